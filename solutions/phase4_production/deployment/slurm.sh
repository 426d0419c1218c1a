#!/usr/bin/env bash
# The trainer under Slurm: two nodes with eight GPUs each.
#
#   sbatch solutions/phase4_production/deployment/slurm.sh
#   touch RUN_DIR/stop                  no further run begins
#   scancel --signal=USR1 JOB_ID        all ranks save, and the job is queued again
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

# torchrun starts the ranks again up to three times; srun must not kill ranks that still save when
# the first node is done.
code=0
srun --kill-on-bad-exit=0 \
  python solutions/phase4_production/deployment/entrypoint.py \
  torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" \
  --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
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

# 75: saved, run it again. All else ends the job, and its output says why: 78 would only come again,
# 74 needs space on the disk.
if [[ $code -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
