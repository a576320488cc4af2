#!/usr/bin/env bash
# Runs some of the GPU tests under NVIDIA's compute-sanitizer: memcheck (addresses outside of what was allocated) and
# racecheck (shared memory that threads of a program write and read unordered). Needs a GPU and about three minutes.
#
#   scripts/sanitize_gpu.sh [memcheck|racecheck ...]
#
# Ends with 0 where a tool has no findings, or where there is no compute-sanitizer, which is said; with 1 otherwise.
set -u
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
seconds=${SECONDS_A_RUN:-45}
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck)

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
if [ -z "$sanitizer" ]; then
    echo "SKIPPED: there is no compute-sanitizer; it comes with the CUDA toolkit (package cuda-sanitizer)"
    exit 0
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "SKIPPED: torch finds no GPU"
    exit 0
fi

# one test of each kind of kernel, the kernel of a whole step, then steps of an engine
kernels="tests/gpu/test_triton_kernels.py tests/gpu/test_triton_moe.py tests/gpu/test_device_step.py"
chosen="(bfloat16 and (norm_behind or decode_attention_with_norms or decode_attention_of_queries or padding_rows \
or prefill_attention or gated_product or embedding or the_block_against)) \
or products_of_few_tokens or draws_are or drafts_are_judged or padded_decode_step or patches_bring or routing"
whole=(tests/gpu/test_whole_step.py -m gpu -k "smollm and (three or seven or spans or padding_only)")
# without graphs: none can be captured while every tensor is an allocation of its own
steps=(tests/gpu/test_device_engine.py -k steps_as_they_are -m "slow or not slow")
test=("$python" -m pytest -x -p no:cacheprovider -p no:warnings)

unset TRITON_INTERPRET
export HEADRACE_CHECK=1
echo "compiling what the tests call, without the sanitizer"
"${test[@]}" $kernels -k "$chosen" >/dev/null && "${test[@]}" "${whole[@]}" >/dev/null &&
    "${test[@]}" "${steps[@]}" >/dev/null || {
    echo "FAILED: these tests fail without the sanitizer already"
    exit 1
}

# every tensor is an allocation of its own, so that a step beyond its end is seen
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in "${tools[@]}"; do
    for part in kernels whole steps; do
        case $part in
            kernels) what=($kernels -k "$chosen") ;;
            whole) what=("${whole[@]}") ;;
            steps) what=("${steps[@]}") ;;
        esac
        log=$(mktemp)
        started=$(date +%s)
        timeout "$seconds" "$sanitizer" --tool "$tool" --target-processes all --error-exitcode 9 --print-limit 5 \
            "${test[@]}" "${what[@]}" >"$log" 2>&1
        code=$?
        passed=$(grep -aoE '[0-9]+ passed' "$log" | tail -1)
        found=$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)
        case $code in
            0) word="clean" ;;
            124) word="NOT FINISHED in $seconds s" ;;
            *) word="FINDINGS (exit code $code)" ;;
        esac
        printf '%-10s %-8s %-28s %3d s  %s  %s\n' "$tool" "$part" "$word" $(($(date +%s) - started)) "${passed:-}" "${found#*=========}"
        if [ $code -ne 0 ]; then
            status=1
            grep -aE '=========|Error|assert' "$log" | head -25
        fi
        rm -f "$log"
    done
done
exit $status
