# sh make.sh TREE OUT: begin the runs of tests/data with the version in TREE, and kill them; OUT/runs has them.
# TREE is `git archive` of a commit: 059eb0e for 0.2.0.
# make_jobs.py makes jobs/ and jobs.json beside them.
# Then: without report.html, with /home/user/made in place of OUT and /home/user/dp_ray in place of TREE in the JSON files.
TREE=$1 OUT=$2; cd $TREE; export PYTHONPATH=$TREE; PY=${PYTHON:-python3}
rm -rf $OUT; mkdir -p $OUT
for name in ddp fsdp predict sweep; do
  $PY -c "import json; from tests.support.old_runs import JOBS; json.dump(JOBS['$name'], open('$OUT/$name.json','w'))"
  how="run --workers 0"; at=14
  [ $name = fsdp ] && { how="run --workers 2"; at=7; }
  [ $name = sweep ] && { how="sweep --over optimizer.args.lr=0.01,0.02"; at=34; }
  [ $name = predict ] && at=8
  set -- $how; cmd=$1; shift
  OLD_RUNS_KILLED_AT=$at timeout 120 nice -n 5 $PY -m dp_ray $cmd $OUT/$name.json "$@" --storage $OUT/runs --name $name > $OUT/$name.log 2>&1
  echo "$name: rc $?"; tail -3 $OUT/$name.log | cut -c1-300
done
find $OUT/runs -type f | xargs ls -la | awk '{print $5,$9}' | head -90
