#!/usr/bin/env bash
# The trainer under Slurm: two nodes with eight GPUs each.
#
#   sbatch solutions/phase4_production/deployment/slurm.sh
#   touch RUN_DIR/stop                  no further run begins
#   scancel --signal=USR1 JOB_ID        all ranks save, and the job is queued again
#   CLUSTER=dgx-h100 sbatch …           nodes below half of that preset's rates count as bad
#
# Sent from the root of the repository, which all nodes see at the same path, with its .venv.
#SBATCH --job-name=imagenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Two minutes before the end of its time, Slurm signals the steps: without "B:", it is srun's tasks
# that get it, and not this script. --requeue covers lost and preempted nodes; for the end of the
# time and for USR1, the last lines queue the job again, so it needs no chain of array tasks.
#SBATCH --signal=USR1@120
set -euo pipefail

config=${CONFIG:-configs/imagenet_resnet50.yaml}
run_dir=${RUN_DIR:-out/imagenet}
data_dir=${IMAGENET:-null} # null: where the bundled digits lie; a recipe for ImageNet refuses it

if [[ -e $run_dir/stop ]]; then
  echo "$run_dir/stop is there: not started"
  exit 0
fi
# shellcheck source=/dev/null
source .venv/bin/activate

# The first node holds the rendezvous, and is a single point of failure: if it is lost, the job
# ends, and Slurm queues it again. The id differs between runs, so that none meets an earlier one.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
export OMP_NUM_THREADS=8
# Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME here if the nodes have several networks. The metrics
# can be read on the node itself only, as other users reach its ports: --metrics_host changes that.

# Before the training, preflight checks each node alone, and then the links between them. What
# crashes or takes longer than five minutes is bad, too. Each function prints the names of bad
# nodes, for which NCCL's own lines must stay away; tasks ignore USR1 meanwhile.
ranks=${SLURM_GPUS_ON_NODE:-1}
check=(-m distlab.production.preflight ${CLUSTER:+"$CLUSTER"})

# shellcheck disable=SC2016 # each task expands the variables itself
alone() {
  srun --kill-on-bad-exit=0 \
    bash -c 'trap "" USR1; timeout -k 60 300 "$@" >&2 || echo "$SLURMD_NODENAME"' - \
    torchrun --standalone --nproc-per-node="$ranks" "${check[@]}"
}

# shellcheck disable=SC2016
together() {
  unset NCCL_DEBUG
  srun --kill-on-bad-exit=0 bash -c 'trap "" USR1; timeout -k 60 300 "$@"' - \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
    --rdzv-id="check-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "${check[@]}"
}

# Slurm changes ExcNodeList only of a job that waits. The first command makes it wait, and also ends
# this script, to which Slurm leaves its KillWait, 30 s by default, once SIGTERM is ignored.
leave_out() {
  local others
  others=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^( ]*\).*/\1/p')
  echo "bad nodes, left out from now on: $1"
  trap '' TERM
  scontrol requeuehold "$SLURM_JOB_ID"
  scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$1${others:+,$others}"
  scontrol release "$SLURM_JOB_ID"
}

bad=$(alone)
links=good
if [[ -z $bad && $SLURM_JOB_NUM_NODES -gt 1 ]]; then
  bad=$(together) || links=bad
fi
number=$(wc -w <<<"$bad")
if [[ $number -gt 1 && $number -eq $SLURM_JOB_NUM_NODES ]]; then
  echo "all nodes are bad, so it may be the check: see above, and which preset CLUSTER names"
  exit 1
elif [[ $number -gt 0 ]]; then
  leave_out "${bad//$'\n'/,}"
  exit 75
elif [[ $links == bad ]]; then
  echo "a link between the nodes is bad, and none of them stands out: not started"
  exit 1
fi

# torchrun starts the ranks again up to three times; srun must not kill ranks that still save when
# the first node is done.
code=0
srun --kill-on-bad-exit=0 \
  python solutions/phase4_production/deployment/entrypoint.py \
  torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" \
  --nproc-per-node="$ranks" \
  --max-restarts=3 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$first:29400" \
  --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  --rdzv-conf=join_timeout=1800,read_timeout=600 \
  --shutdown-timeout=90 \
  -m solutions.phase4_production.imagenet_trainer \
  --config "$config" \
  --run_dir "$run_dir" \
  --data_dir "$data_dir" \
  --metrics_port 9400 || code=$?

# 75: saved, run it again. 69: a node was lost, and the file server still holds its lock; or another
# job has the same RUN_DIR, and this one waits for its end. All else ends the job, and its output
# says why: 78 would only come again, 74 needs space on the disk.
if [[ $code -eq 75 || $code -eq 69 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
