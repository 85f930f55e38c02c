// What a jet does at one point and column: the lines inside of a loop over points. The loops over
// directions and second derivatives are of run-time lengths. A result may lie where its own sum, or
// its own cotangent, is: each is read last where it is written.

//$ for name in READ["value"]:
let in_$name = ${LOAD[name]};
//$ end
//$ if CALL["value"]:
let made = ${CALL["value"]};
//$ end
//$ if BACKWARD:
//$ for x in TOTALS:
var $x = ${MADE["value"].get(x, ZERO)};
//$ end
//$ if DIRECTIONS:
//$ for i in APART or [""]:
//$ if APART:
{
    let d = ${i}u;
//$ else:
for (var d = 0u; d < $DIRECTIONS; d++) {
//$ end
    //$ if "grad_bent" in READ["direction"]:
    //$ if WEIGHT:
    var in_grad_bent = $ZERO;
    for (var s = 0u; s < $SECONDS; s++) {
        let weight = $WEIGHT;
        if (weight != 0) {
            in_grad_bent += weight * ${LOAD["grad_ddot"]};
        }
    }
    //$ else:
    let s = d;
    let in_grad_bent = ${LOAD["grad_ddot"]};
    //$ end
    //$ end
    //$ for name in READ["direction"]:
    //$ if name != "grad_bent":
    let in_$name = ${LOAD[name]};
    //$ end
    //$ end
    //$ if CALL["direction"]:
    let moved = ${CALL["direction"]};
    //$ end
    //$ for x in TOTALS:
    $x += ${MADE["direction"].get(x, ZERO)};
    //$ end
    //$ if "d_z_dot" in STORE:
    ${STORE["d_z_dot"]}(${MADE["direction"].get("d_z_dot", ZERO)});
    //$ end
    //$ if APART:
    sum_$i += ${MADE["direction"].get("d_z_dot", ZERO)};
    //$ end
}
//$ end
//$ end
//$ if SECONDS:
for (var s = 0u; s < $STRAIGHT; s++) {
    //$ for name in READ["second"]:
    let in_$name = ${LOAD[name]};
    //$ end
    //$ if CALL["second"]:
    let moved = ${CALL["second"]};
    //$ end
    //$ for x in TOTALS:
    $x += ${MADE["second"].get(x, ZERO)};
    //$ end
    //$ if "d_z_ddot" in STORE:
    ${STORE["d_z_ddot"]}(${MADE["second"].get("d_z_ddot", ZERO)});
    //$ end
}
//$ end
//$ for x in TOTALS:
//$ if x in STORE:
${STORE[x]}($x);
//$ end
//$ end
//$ else:
//$ if SECONDS:
for (var s = 0u; s < $SECONDS; s++) {
    var total = $ZERO;
    //$ if CALL["bend"]:
    //$ if WEIGHT:
    for (var d = 0u; d < $DIRECTIONS; d++) {
        let weight = $WEIGHT;
        if (weight != 0) {
            //$ for name in READ["bend"]:
            let in_$name = ${LOAD[name]};
            //$ end
            total += weight * ${CALL["bend"]}.bent;
        }
    }
    //$ else:
    let d = s;
    //$ for name in READ["bend"]:
    let in_$name = ${LOAD[name]};
    //$ end
    total = ${CALL["bend"]}.bent;
    //$ end
    //$ end
    //$ if CALL["second"]:
    if (s < $STRAIGHT) {
        //$ for name in READ["second"]:
        let in_$name = ${LOAD[name]};
        //$ end
        total += ${CALL["second"]}.straight;
    }
    //$ end
    ${STORE["out_ddot"]}(total);
}
//$ end
//$ if DIRECTIONS:
for (var d = 0u; d < $DIRECTIONS; d++) {
    //$ for name in READ["direction"]:
    let in_$name = ${LOAD[name]};
    //$ end
    //$ if CALL["direction"]:
    let moved = ${CALL["direction"]};
    //$ end
    ${STORE["out_dot"]}(${MADE["direction"].get("out_dot", ZERO)});
}
//$ end
${STORE["out"]}(${MADE["value"].get("out", ZERO)});
//$ if "pre" in STORE:
${STORE["pre"]}(${MADE["value"].get("pre", ZERO)});
//$ end
//$ end
