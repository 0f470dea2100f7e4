"""The host libraries' own hub code, against a small hub on this machine, in a process that knows no other."""

import json
import os
import subprocess
import sys
import textwrap

import timm
import torch
import transformers
from timm.models._hub import save_for_hf

CHILD = textwrap.dedent("""
    import functools, hashlib, http.server, os, pathlib, sys, threading

    class Hub(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):  # /OWNER/NAME/resolve/REVISION/FILE
            parts = path.split("?")[0].strip("/").split("/")
            return str(pathlib.Path(sys.argv[1], *(parts[:2] + parts[4:] if "resolve" in parts else ["none"])))

        def end_headers(self):
            file = pathlib.Path(self.translate_path(self.path))
            if file.is_file():
                self.send_header("ETag", hashlib.sha256(file.read_bytes()).hexdigest())
                self.send_header("X-Repo-Commit", "0" * 40)
            super().end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    import torch
    from selectivit.models.weights import WeightsError, load_model

    def total(name):
        return sum(value.double().sum() for value in load_model(name).state_dict().values()).item()

    names = ["org/dinov2", "timm:hf-hub:org/vit"]
    print(*[total(name) for name in names])
    try:
        load_model("org/none")
    except WeightsError as error:
        print(str(error).replace("\\n", " "))
    server.shutdown()
    server.server_close()
    print(*[total(name) for name in names])  # from the hub's local cache
""")


def test_models_come_from_the_hub_and_then_from_its_cache(tmp_path):
    config = transformers.Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    dinov2 = transformers.Dinov2Model(config)
    dinov2.save_pretrained(tmp_path / "hub" / "org" / "dinov2")
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    save_for_hf(
        vit, str(tmp_path / "hub" / "org" / "vit"), safe_serialization=True, model_args={"img_size": 32, "depth": 1}
    )
    expected = [sum(value.double().sum() for value in each.state_dict().values()).item() for each in (dinov2, vit)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "hub")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, error, second = done.stdout.strip().splitlines()
    torch.testing.assert_close(torch.tensor(json.loads(f"[{first.replace(' ', ',')}]")), torch.tensor(expected))
    assert first == second
    assert "cannot load org/none" in error and "open_clip:org/none" in error
