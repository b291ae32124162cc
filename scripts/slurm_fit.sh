#!/bin/bash
# Train under SLURM: one process per GPU; a job that is stopped is requeued, and resumes at the next batch.
#
#   sbatch --nodes 1 --gres gpu:8 --ntasks-per-node 8 scripts/slurm_fit.sh NAME --config CONFIG.yaml
#
#SBATCH --job-name captioning
#SBATCH --time 24:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --signal TERM@300
# The signal comes 300 s before the end of the time; a pre-empted job gets it at once. A validation in progress is
# finished first: if it takes longer than that, the run goes on from the last checkpoint that was saved.

name=$1
case $name in '' | -*)
    echo "usage: slurm_fit.sh NAME OPTIONS, as captioning fit takes them" >&2
    exit 2
    ;;
esac
shift
name=$name${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # tasks of an array are runs of their own
runs=runs
before=
for word in "$@"; do
    case $before,$word in
    --runs,*) runs=$word ;;
    *,--runs=*) runs=${word#--runs=} ;;
    esac
    before=$word
done
resume=()
last=$runs/$name/checkpoints/last.ckpt
if [ -f "$last" ]; then
    resume=(--ckpt_path last)
elif [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    rm -f "$runs/$name/config.yaml" # this job was killed before its first checkpoint: the name is its own
fi
started=$(mktemp)
${LAUNCH:-srun} "${PYTHON:-python}" -m captioning fit --name "$name" "$@" "${resume[@]}"
code=$?
if [ "$code" -eq 143 ] && [ -n "$SLURM_JOB_ID" ]; then # stopped on request, or because another task failed
    if [ "$last" -nt "$started" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "slurm_fit.sh: stopped without anything saved, after $SLURM_RESTART_COUNT restarts: not requeued" >&2
    fi
fi
rm -f "$started"
exit "$code"
