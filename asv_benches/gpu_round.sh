#!/usr/bin/env bash
# What a GPU has to tell before a release, the most important first; each step has a limit of time.
#
#     asv_benches/gpu_round.sh OUT [PART ...]
#
# Parts: tests streams networks tiles webgpu laplacian gated modules sweep (all of them by default). Each writes a
# log into the folder OUT. Kernels are compiled ahead, many at once, so that timed steps find them.
set -u
out=$(realpath -m "${1:?the folder for logs}")
shift
parts=" ${*:-tests streams networks tiles webgpu laplacian gated modules sweep} "
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
cd "$here" || exit

want() { [[ $parts == *" $1 "* ]]; }
# limited SECONDS LOG COMMAND...: a step, and where its log is
limited() {
    local seconds=$1 log=$2
    shift 2
    timeout -k 15 "$seconds" "$@" >> "$out/$log.log" 2>&1
    local status=$?
    echo "$(date +%T) $log: status $status"
}
python="python3 -W ignore"
tiles32="64,8,128,2 64,4,256,2 64,4,256,2/64,8,128,2 64,8,128,2/64,4,256,2"
tiles128="128,8,256,1 128,8,128,2/128,8,256,1"
tiles64="64,4,256,1 64,4,128,2/64,4,256,1"

if want tests; then
    limited "${TESTS_SECONDS:-150}" tests $python -m pytest -p no:cacheprovider -o addopts="" -n 12 -m "" -v --tb=short \
        --dist=worksteal "$here"/../tests/cuda/test_*{series,half_networks,values,jets,networks}.py \
        "$here/../tests/webgpu/test_webgpu_networks.py" "$here/../tests/conformance/test_networks.py" \
        -k "not cpu and not reference"
fi
if want streams; then  # networks whose weights come in slices: what is right first, then tiles beside one another
    rows=("float32/100000 p/128,8,256,1 128,8,128,2,32,2 128,8,128,3,32,2/128,8,128,2,32,2 128,8,128,2,16,3 128,4,256,2,16,3"
        "float64/50000 p/128,4,256,1,16,2 128,4,256,1,8,3"
        "float32/x 192/192,4,384,1,16,3 256,8,256,1,16,3"
        "float32/x 256/256,8,256,1,16,3 256,8,256,1,16,2"
        "float32/x 96/96,4,384,1 96,4,192,2,16,3")
    streamed() {
        local dtype points words
        IFS=/ read -r dtype points words <<< "$2"
        limited "$3" "$1" $python jets_gpu.py --only "$dtype" "$points" --tiles $words
    }
    for row in "${rows[@]}"; do streamed ahead "$row" 150 & done
    limited 240 stream_tests $python -m pytest -p no:cacheprovider -o addopts="" -n 10 -m "" -v --tb=short \
        --dist=worksteal "$here"/../tests/cuda/test_cuda_{networks,values}.py -k many_columns
    wait
    for row in "${rows[@]}"; do streamed streams "$row" 40; done
fi
if want networks; then
    for what in inference "training, 64" "training, d_x"; do
        limited 120 ahead $python networks_gpu.py --only bfloat16 relu "$what" --seconds 0.02 &
    done
    wait
    limited 100 networks $python networks_gpu.py --only bfloat16 relu --seconds 0.3
fi
if want tiles; then
    limited 110 ahead $python jets_gpu.py --only float32 "20000 p" --tiles $tiles32 &
    limited 110 ahead $python jets_gpu.py --only float32 "100000 p" --tiles $tiles128 &
    limited 110 ahead $python jets_gpu.py --only float64 "20000 p" --tiles $tiles64 &
    wait
    limited 40 tiles $python jets_gpu.py --only float32 "20000 p" --tiles $tiles32
    limited 40 tiles $python jets_gpu.py --only float32 "100000 p" --tiles $tiles128
    limited 40 tiles $python jets_gpu.py --only float64 "20000 p" --tiles $tiles64
    limited 90 burgers $python jets_gpu.py --only Burgers --seconds 1.5
fi
if want webgpu; then
    limited 60 webgpu $python webgpu_networks.py --shapes 20000x4x64 2000x4x32
    limited 60 webgpu $python jets.py --webgpu --seconds 1
fi
if want laplacian; then
    limited 100 laplacian $python jets_gpu.py --only Laplacian --folx --seconds 0.7 --no-compile
fi
if want gated; then
    limited 60 gated $python gated.py --device cuda --dtypes float64 --shapes 4096x1024x2816 700x500x900 --rounds 5
    limited 100 gated $python gated.py --device cuda --dtypes bfloat16 --shapes 8192x2048x5632 333x1000x777 \
        --compile --autotune --rounds 7
    limited 40 gated $python webgpu.py --gated 4096,256,704 8192,64,1024 2048,1024,2816
    limited 60 gated $python gated.py --device cuda --only-jax --dtypes bfloat16 float32 --shapes 8192x2048x5632 --rounds 7
fi
if want modules; then
    limited 60 modules $python uses.py --device cuda --only SwiGLU
fi
if want sweep; then
    limited 600 sweep $python cuda_sweep.py --minutes 9 --into "$out/sweep.json"
fi
tail -n 3 "$out"/*.log
