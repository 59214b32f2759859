"""The installed commands, run to their end."""

import subprocess
import sys
from pathlib import Path


def ran(config: Path, program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command for this federation; assert its exit code, and return its result."""
    command = [str(Path(sys.executable).with_name(program)), "--config", str(config), *arguments]
    ended = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code, ended
    assert "Traceback" not in ended.stderr
    return ended
