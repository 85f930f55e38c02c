//$ if BACK:
// The gradients by the sums of a layer with `n` columns, in the place of those by its results.
//$ else:
// The results of a layer with `n` columns, in the place of its sums.
//$ end
// Second derivatives of a first layer's inputs are 0: it is not `inner`.
fn $NAME(t: u32, points: u32, n: u32, inner: bool$PLACES) {
    let four = t % ${FOURS}u;
    let there = inside(four, n);
    if (four * 4u >= n) {
        return;
    }
    //$ for name, at in WEIGHTS:
    let $name = bitcast<f32>(table[p.weights + ${at // 4}u][${at % 4}]);
    //$ end
    for (var point = t / ${FOURS}u; point < $LIMIT; point += ${STEP}u) {
        //$ if KEEP:
        let kept = point * ${FOURS}u + four;
        if (point >= points) {
            // What there is not is no summand of a gradient of weights.
            //$ for m in range(MEMBERS):
            work[inputs + kept + ${m * POINTS * FOURS}u] = NO;
            //$ end
            continue;
        }
        //$ end
        let at = place(point, four);
        //$ for m in range(MEMBERS):
        //$ if BACK:
        let z_$m = work[sums + point * ${FOURS}u + four + ${m * POINTS * FOURS}u];
        let g_$m = tile[${AT[m]}];
        //$ else:
        let z_$m = tile[${AT[m]}];
        //$ end
        //$ end
        //$ for name, value in LINES:
        let $name = $value;
        //$ end
        //$ for m, value in RESULTS:
        let out_$m = select(NO, $value, there);
        //$ end
        //$ for m in range(MEMBERS):
        tile[${AT[m]}] = out_$m;
        //$ if KEEP:
        work[sums + kept + ${m * POINTS * FOURS}u] = z_$m;
        work[inputs + kept + ${m * POINTS * FOURS}u] = out_$m;
        //$ end
        //$ end
    }
}

