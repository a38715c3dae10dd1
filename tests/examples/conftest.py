"""The suite of `make test-examples`, in an environment with Gradio; elsewhere nothing is collected."""

import os
import shutil
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("gradio") and find_spec("playwright") else ["test_*.py"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A moving pattern in place of a camera, and nobody asked whether it may be seen.
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    found = [os.environ.get("CHROMIUM"), *map(shutil.which, BROWSERS)]
    path = next(filter(None, found), None)
    if path is None:
        pytest.skip("no Chromium: install one, or name its program in CHROMIUM")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=CAMERA)
        yield opened
        opened.close()
