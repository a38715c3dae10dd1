"""Reading media is imported by those who may never read any."""

import subprocess
import sys


def test_importing_media_loads_no_library_for_it():
    code = "import sys, vlexport.media; print(*sorted({'torch', 'numpy', 'av', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
