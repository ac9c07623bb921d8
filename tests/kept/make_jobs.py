"""The job files of a version, as it understands them: `make_jobs.py TREE OUT`, run with that version.

TREE is its `git archive`, in which it runs. OUT/jobs gets its job files, those in jobs/ and the whole jobs of its
pages, and jobs.json what it makes of each: the described job, its fingerprint, and the plan where its data are there.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import dp_ray


def main(tree: Path, out: Path) -> None:
    """Write the files."""
    (out / "jobs").mkdir(parents=True)
    texts = {path.name: path.read_text() for path in sorted((tree / "jobs").glob("*.yaml"))}
    for page in [tree / "README.md", *sorted((tree / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        texts |= {f"{page.stem}-{number}.yaml": text for number, text in enumerate(blocks, 1)}
    made: dict[str, Any] = {}
    for name, text in texts.items():
        path = out / "jobs" / name
        try:
            job = dp_ray.Job.make(yaml.safe_load(text), path.stem)
        except (dp_ray.Error, TypeError):
            continue  # a part of a job
        path.write_text(text)
        line = [sys.executable, "-m", "dp_ray", "plan", str(path), "--json"]
        done = subprocess.run(line, cwd=tree, capture_output=True, text=True, check=False)
        plan = json.loads(done.stdout) if done.returncode == 0 else None
        made[name] = {"job": job.describe(), "fingerprint": job.fingerprint(), "plan": plan}
    (out / "jobs.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
