#!/bin/bash
# Runs a job on machines that you reach by ssh: bash hosts.sh job.yaml --workers 8 --storage /shared/runs
# To stop it, and keep its work: dp-ray stop RUN_DIR. Ctrl-C here only ends the connections, and with them the run.
hosts=(10.0.0.1 10.0.0.2)  # the machines; the first one runs the job
meet=/shared/meet-$$       # a folder that all of them share
folder=$PWD                # where your code is on each
program=dp-ray             # how each runs dp-ray

command=$(printf '%q ' "$@")
trap 'kill $(jobs -p)' INT TERM
for rank in "${!hosts[@]}"; do
    node="$program node --hosts ${#hosts[@]} --rank $rank --meet $meet -- run $command"
    ssh -tt "${hosts[$rank]}" "cd $(printf '%q' "$folder") && $node" < /dev/null &  # -tt: it ends with the connection
    [ "$rank" = 0 ] && first=$!
done
wait "$first"
status=$?
wait
exit "$status"
