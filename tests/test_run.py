"""How runs begin and end: the terminal, signals, locks, what is replaced, and errors that are no bugs."""

import ast
import dataclasses
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pytest
from helpers import ROOT, base_config, byte_tokenizer, launch, tiny_llama

import prepare_data
import train_ppo
from evaluate import EvaluateConfig, evaluate
from train_reward import RewardTrainConfig
from train_reward import train as train_reward
from utils.config import ModelConfig, UserError
from utils.data import show
from utils.files import locked, write_json
from utils.launch import wait_for_compiler
from utils.models import adapter_base, resolve_model_path
from utils.run import alone, check_inputs, open_output_dir
from utils.tracking import start_trackers

STAGE = '''
import os, signal, sys, time, types
from dataclasses import dataclass
from pathlib import Path
sys.path.insert(0, {root!r})
utils = sys.modules["utils"] = types.ModuleType("utils")  # without what the package itself imports: PyTorch
utils.__path__ = [{root!r} + "/utils"]
from utils.run import alone, open_output_dir, record_run, run_stage
from utils.config import RunStopped, UserError
from utils.tracking import progress_bar, say

@dataclass(frozen=True)
class Config:
    """A stage of a test."""
    output_dir: str = "out"
    """folder"""
    overwrite: bool = False
    """replace"""
    text: str = ""
    """what it does"""

@alone
def stage(cfg):
    folder = Path(cfg.output_dir)
    if os.environ.get("RANK", "0") == "0":
        record_run(open_output_dir(cfg.output_dir, cfg.overwrite), cfg)
{body}

if __name__ == "__main__":
    run_stage(stage, Config)
'''


def stage_file(folder: Path, body: str) -> str:
    """A stage of a few lines in `folder`, which starts without PyTorch."""
    (folder / "stage.py").write_text(
        STAGE.format(root=str(ROOT), body="\n".join(f"    {x}" for x in body.split("\n")))
    )
    return str(folder / "stage.py")


def run(folder: Path, body: str, *options, shell: str = "{}", **env) -> subprocess.CompletedProcess:
    command = [sys.executable, stage_file(folder, body), *map(str, options)]
    return subprocess.run(
        ["bash", "-c", shell.format(shlex.join(command))], cwd=folder, capture_output=True, env=os.environ | env
    )


def popen(command: list[str], folder: Path, **more) -> subprocess.Popen:
    """A process that Ctrl-C can end, whoever started the tests; its output is text in pipes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    heard = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    return subprocess.Popen(command, cwd=folder, **pipes | heard | more)


def begin(folder: Path, body: str, *options) -> subprocess.Popen:
    """The stage in a process, once it has said `ready`."""
    command = [sys.executable, stage_file(folder, f"say('ready')\n{body}"), *options]
    process = popen(command, folder)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


# ------------------------------------------------------------------------------------------------- the terminal


def terminal(command: list[str], folder: Path, **env) -> list[str]:
    """The lines that a terminal of 160 columns shows in the end, those that scrolled away included."""
    main, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    process = subprocess.Popen(command, cwd=folder, stdout=other, stderr=other, stdin=other, env=os.environ | env)
    os.close(other)
    data = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        data += part
        if not part:
            break
    assert process.wait() == 0, data.decode(errors="replace")[-3000:]
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", data.decode(errors="replace")):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token == "\x1b[A":
            row -= 1
        elif len(token) == 1:
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def test_log_lines_push_the_bars_down(tmp_path):
    body = """bar = progress_bar(label="outer", unit="step", total=4)
for i in range(4):
    with progress_bar(label="inner", unit="row", total=2) as inner:
        say(f"step {i}: within both")
        inner.update(2)
    bar.update(1)
    say(f"step {i}: two lines\\nof one call")
bar.close()
say("done")"""
    lines = terminal([sys.executable, stage_file(tmp_path, body)], tmp_path)
    logged = [line for line in lines if line and "%|" not in line]
    assert logged == [
        *(x for i in range(4) for x in (f"step {i}: within both", f"step {i}: two lines", "of one call")),
        "done",
    ]
    assert sum(line.startswith("outer: 100%|") for line in lines) == 1
    assert not any(re.search(r"\S.*(step|two|done|of one).*%\||%\|.*(within|two lines)", line) for line in lines)


def test_a_training_stage_on_a_terminal(tmp_path, tiny, preferences):
    options = (
        f"--model.path {tiny} --model.dtype float32 --data {preferences} --output_dir out --lora.r 4 --epochs 0.2"
    )
    command = [sys.executable, str(ROOT / "train_reward.py"), *options.split(), "--train_batch_size", "4"]
    lines = terminal([*command, "--log_every", "1", "--eval_every", "2", "--report_to", "none"], tmp_path)
    steps = [line for line in lines if re.search(r"step \d+/\d+ ", line)]
    assert len(steps) == 4 and all(re.match(r"step \d/4  loss ", line) for line in steps), lines
    assert any(line.startswith("held-out accuracy ") for line in lines) and any("reward: 100%" in x for x in lines)
    assert not any("%|" in line and re.search(r"loss|first pair|held-out|wrote", line) for line in lines)


def test_stages_print_by_say_alone():
    """A plain print would begin at a bar's end."""
    files = [*ROOT.glob("*.py"), ROOT / "utils/guards.py", ROOT / "utils/checkpoint.py", ROOT / "utils/models.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"), (file, node.lineno)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x08c\x00d\x7f", "a\\rb\\x08c\\x00d\\x7f"),
        ("\x9b31m \x85", "\\x9b31m \\x85"),
        ("left \u202eright\u2066", "left \\u202eright\\u2066"),
        ("tab\tline\nü 你 ‹›", "tab\tline\nü 你 ‹›"),
    ],
)
def test_control_characters_never_reach_the_terminal(text, shown):
    assert show(text) == shown


@pytest.mark.parametrize("shell", ["{} >&-", "{} 2>&-", "{} >&- 2>&- <&-"])
def test_closed_streams_do_not_end_a_run(tmp_path, shell):
    body = "say('± ok')\nfor _ in progress_bar(range(2)): pass\n(folder / 'metrics.jsonl').write_text('done')"
    result = run(tmp_path, body, shell=shell)
    assert result.returncode == 0 and (tmp_path / "out" / "metrics.jsonl").read_text() == "done", result.stderr


def test_an_ascii_console_and_a_file_name_of_another_encoding(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "a.yaml").write_text("text: größer\n", encoding="utf-8")
    for options in ([], ["--config", "a.yaml"]):
        result = run(
            tmp_path, "print('± 2', cfg.text)\nsay('± 3')", "--output_dir", name, "--overwrite", *options, **env
        )
        assert result.returncode == 0, result.stderr
        text = "gr\\xf6\\xdfer" if options else ""
        assert result.stdout.decode("ascii").splitlines()[-2:] == [f"\\xb1 2 {text}", "\\xb1 3"]
    record = json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8"))
    assert shlex.split(record["command"])[1:3] == ["--output_dir", name]
    assert run(tmp_path, "raise UserError('± no')", **env).stderr == b"error: \\xb1 no\n"


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(tmp_path):
    body = "for i in range(10000): say(f'{i:1000}')"
    result = run(tmp_path, body, shell="set -o pipefail; {} | head -1")
    assert result.returncode == 128 + signal.SIGPIPE and result.stdout.split() == [b"0"]
    assert result.stderr.decode() == "stopped: nobody reads the output any more; run the same command again\n"
    result = run(tmp_path, "", "--help", shell="set -o pipefail; {} | true")
    assert result.stderr == b""


# ------------------------------------------------------------------------------------------------ errors, signals


@pytest.mark.parametrize(
    "body, code, line",
    [
        ("raise UserError('row 3 is empty')", 2, "error: row 3 is empty"),
        ("raise RunStopped('at step 3')", 3, "stopped: at step 3"),
        ("open('/dev/full', 'w').write('x' * 100000)", 2, "error: output_dir out: No space left on device; run the"),
        ("open('/proc/version/x')", 2, "error: /proc/version/x: Not a directory; run the same command again"),
        ("open('gone.json')", 2, "error: gone.json: No such file or directory; run the same command again"),
        ("raise UserError('\\x1b[31mred')", 2, "error: \\x1b[31mred"),
    ],
)
def test_what_the_user_can_mend_is_one_line(tmp_path, body, code, line):
    result = run(tmp_path, body)
    assert result.returncode == code and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.decode().startswith(line)


@pytest.mark.parametrize(
    "body",
    [
        "{}['x']",
        "raise OSError('of some library')",
        "raise RuntimeError('os error 28')",
        "raise ConnectionResetError(104, 'x')",
    ],
)
def test_a_bug_keeps_its_traceback(tmp_path, body):
    result = run(tmp_path, body)
    assert result.returncode == 1 and b"Traceback" in result.stderr and body.encode()[:12] in result.stderr


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    body = (
        "import numpy\nfrom safetensors.numpy import save_file\nsave_file({'a': numpy.zeros(100000)}, 'a.safetensors')"
    )
    result = run(tmp_path, body, shell="ulimit -f 100; {}")
    assert result.returncode == 2, result.stderr
    assert result.stderr.decode().startswith("error: output_dir out: File too large; "), result.stderr


@pytest.mark.parametrize("number, word", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_end_a_run_with_one_line(tmp_path, number, word):
    process = begin(tmp_path, "import subprocess\nsubprocess.run(['true'])\ntime.sleep(600)")
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (128 + number, f"{word}; run the same command again\n")
    assert not (tmp_path / "out" / ".lock").exists()


def test_a_signal_that_a_library_swallows_comes_again(tmp_path):
    process = begin(tmp_path, "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pass\ntime.sleep(600)")
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert (process.returncode, error) == (143, "terminated; run the same command again\n")


def test_forked_workers_end_without_a_word(tmp_path):
    body = """from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
    list(pool.map(time.sleep, [50] * 8))"""
    command = [sys.executable, stage_file(tmp_path, f"say('ready')\n{body}")]
    process = popen(command, tmp_path, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    out, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (130, "interrupted; run the same command again\n")


def test_importing_and_calling_a_stage_leaves_signals_and_streams_alone(tmp_path):
    code = (
        "import signal, sys, evaluate, train_ppo, train_reward, prepare_data; from utils.run import alone\n"
        "before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout, sys.stdout.errors\n"
        "from evaluate import EvaluateConfig; from utils.config import ModelConfig\n"
        "cfg = EvaluateConfig(ModelConfig('m'), ModelConfig('m'), 'd', 'out')\n"
        "try: evaluate.evaluate(cfg)\nexcept Exception as error: print(error)\n"
        "after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout, sys.stdout.errors\n"
        "assert before == after and before[0] is signal.default_int_handler"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and "nothing to compare by" in result.stdout, result.stderr
    assert not (tmp_path / "out").exists()


LOOP = """--model.path {tiny} --model.dtype float32 --data {data} --output_dir out --lora.r 4 --report_to none
--train_batch_size 4 --save_every 1"""
PPO = """--reward_model.style function --reward_model.function test_ppo:letters_a --ppo_mini_batch_size 4
--ppo_micro_batch_size_per_gpu 2 --max_response_length 4 --total_steps 500"""


@pytest.mark.parametrize("stage, more, number", [("train_ppo", PPO, 2), ("train_reward", "--epochs 50", 15)])
def test_a_training_run_that_is_cut_off_names_its_checkpoint(tmp_path, tiny, preferences, stage, more, number):
    options = [*LOOP.format(tiny=tiny, data=preferences).split(), *more.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(ROOT / f"{stage}.py"), *options]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("out/checkpoints/step_*")) and process.poll() is None:
        time.sleep(0.1)
    second = subprocess.run([*command, "--overwrite"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert second.returncode == 2 and process.poll() is None
    assert second.stderr == "error: another run is writing output_dir out; wait for it, or choose another one\n"
    process.send_signal(number)
    error = process.communicate(timeout=300)[1]
    newest = sorted(tmp_path.glob("out/checkpoints/step_*"))[-1].relative_to(tmp_path)
    word = "interrupted" if number == 2 else "terminated"
    line = f"{word}; the newest checkpoint is {newest}; the same command with --resume auto goes on from it\n"
    assert (process.returncode, error) == (128 + number, line)
    assert (tmp_path / "out" / "report.html").exists() == (stage == "train_ppo")
    assert not list(tmp_path.glob("out/.*"))


# ------------------------------------------------------------------------------------------- one run, one folder


@dataclass(frozen=True)
class Config:
    output_dir: str
    overwrite: bool = False
    data: str = ""
    files: tuple = ()


def test_the_lock_leaves_nothing_behind_and_works_again(tmp_path):
    seen = []

    @alone
    def stage(cfg):
        seen.append(sorted(path.name for path in Path(cfg.output_dir).iterdir()))
        if cfg.data:
            raise UserError(cfg.data)
        (Path(cfg.output_dir) / "run.json").write_text("{}")

    with pytest.raises(UserError, match="^no$"):
        stage(Config(str(tmp_path / "a" / "b"), data="no"))
    assert not (tmp_path / "a").exists()
    stage(Config(str(tmp_path / "a" / "b")))
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["run.json"]
    (tmp_path / "a" / "b" / ".lock").touch()  # of a run that was killed
    stage(Config(str(tmp_path / "a" / "b"), overwrite=True))
    assert seen == [[".lock"], [".lock"], [".lock", "run.json"]]
    with pytest.raises(UserError, match="is not empty"):
        stage(Config(str(tmp_path / "a" / "b")))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"file cannot be written \(it is a file\); choose another one"):
        stage(Config(str(tmp_path / "file")))


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    first = begin(tmp_path, "time.sleep(600)")
    for options in ([], ["--overwrite"], ["--output_dir", "./out/../out"], ["--output_dir", tmp_path / "out"]):
        result = run(tmp_path, "", *options)
        assert result.returncode == 2 and b"another run is writing output_dir" in result.stderr, options
    first.kill()
    first.communicate()
    assert (tmp_path / "out" / ".lock").exists() and run(tmp_path, "", "--overwrite").returncode == 0


def test_the_check_happens_under_the_lock(tmp_path, monkeypatch):
    """The first run may end between a second one's start and its lock."""
    import utils.run

    def finishes_meanwhile(file, refusal):
        (tmp_path / "out" / "run.json").write_text("{}")
        return locked(file, refusal)

    monkeypatch.setattr(utils.run, "locked", finishes_meanwhile)
    with pytest.raises(UserError, match="is not empty"):
        alone(lambda cfg: (tmp_path / "out" / "run.json").write_text("lost"))(Config(str(tmp_path / "out")))
    assert (tmp_path / "out" / "run.json").read_text() == "{}"


def test_stage_1_checks_its_folder_under_the_lock_and_keeps_what_it_did_not_write(tmp_path, tiny, monkeypatch):
    (tmp_path / "raw.jsonl").write_text('{"prompt": "a", "chosen": "yes", "rejected": "no"}\n')
    options = dict(source=str(tmp_path / "raw.jsonl"), tokenizer=tiny, output_dir=str(tmp_path / "out"))
    config = prepare_data.DataConfig(**options, workers=1, eval_fraction=0.0)
    real, left = prepare_data.workshop, []

    def finishes_meanwhile(output, about):
        output.mkdir(exist_ok=True)
        for name in ("run.json", "train-00000-of-00001.parquet", *left):
            (output / name).write_text("{}")
        return real(output, about)

    monkeypatch.setattr(prepare_data, "workshop", finishes_meanwhile)
    with pytest.raises(UserError, match="is not empty"):
        prepare_data.prepare(config)
    assert (tmp_path / "out" / "train-00000-of-00001.parquet").read_text() == "{}"
    left.append("notes.txt")
    assert prepare_data.prepare(dataclasses.replace(config, overwrite=True))["rows_out"]["train"] == 1
    assert (tmp_path / "out" / "notes.txt").read_text() == "{}"
    assert (tmp_path / "out" / "train-00000-of-00001.parquet").read_bytes()[:4] == b"PAR1"


def test_a_lock_file_that_was_deleted_is_no_lock(tmp_path):
    with locked(tmp_path / "lock", "busy"):
        (tmp_path / "lock").unlink()
    with locked(tmp_path / "lock", "busy"):
        assert (tmp_path / "lock").exists()


def test_overwriting_deletes_what_a_run_wrote_and_no_more(tmp_path, capsys):
    folder = tmp_path / "out"
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    (folder / "final").mkdir()
    (folder / ".final.tmp").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("w")
    (folder / "adapter").symlink_to(tmp_path / "elsewhere")
    for name in ("run.json", "config.yaml", "metrics.jsonl", "thesis.txt", "train-00000-of-00001.parquet", ".lock"):
        (folder / name).write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    open_output_dir(str(tmp_path / "link"), True)
    left = [".lock", "thesis.txt", "train-00000-of-00001.parquet"]
    assert sorted(path.name for path in folder.iterdir()) == left and (tmp_path / "elsewhere" / "weights").exists()
    line = f"left in {tmp_path / 'link'}, since no run wrote it: thesis.txt, train-00000-of-00001.parquet\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("data", ["out", "out/data", "link/data", "out/final/config.json", "out/../out"])
def test_overwriting_never_deletes_an_input(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "data").mkdir(parents=True)
    (tmp_path / "out" / "final").mkdir()
    (tmp_path / "out" / "final" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    message = f"^data {data} lies in output_dir out, which overwrite would replace; choose another output_dir$"
    with pytest.raises(UserError, match=message):
        check_inputs(Config("out", True, data))
    with pytest.raises(UserError, match=f"^files {data} lies"):
        check_inputs(Config("out", True), {"files": ["other", data]})
    check_inputs(Config("out", False, data))
    check_inputs(Config("other", True, data))
    check_inputs(Config("out/data/new", True, data.replace("final/config.json", "data")))


def test_stages_refuse_to_replace_their_inputs(tmp_path, tiny, preferences):
    import shutil

    model, out = str(tmp_path / "c" / "final"), tmp_path / "c"
    shutil.copytree(tiny, model)
    (out / "run.json").write_text("{}")
    with pytest.raises(UserError, match="model.path .* lies in output_dir"):
        train_ppo.train(base_config(model, preferences, out, overwrite=True))
    with pytest.raises(UserError, match="model.path .* lies in output_dir"):
        train_reward(RewardTrainConfig(ModelConfig(model), preferences, str(out), overwrite=True))
    with pytest.raises(UserError, match="baseline.path .* lies in output_dir"):
        evaluate(EvaluateConfig(ModelConfig(tiny), ModelConfig(model), preferences, str(out), overwrite=True))
    data = tmp_path / "data"
    shutil.copytree(preferences, data)
    with pytest.raises(UserError, match="data .* lies in output_dir"):
        train_ppo.train(base_config(tiny, str(data), data, overwrite=True))
    with pytest.raises(UserError, match="holds the output of Data, so it is not replaced"):
        train_ppo.train(base_config(tiny, preferences, data, overwrite=True))
    assert (Path(model) / "model.safetensors").exists() and list(data.glob("*.parquet"))


def test_a_configuration_in_the_folder_that_is_replaced(tmp_path):
    assert run(tmp_path, "").returncode == 0
    before = (tmp_path / "out" / "config.yaml").read_text()
    for options in (["--config", "out/config.yaml"], ["--config=out/config.yaml"]):
        result = run(tmp_path, "", *options, "--overwrite")
        assert result.returncode == 2
        assert result.stderr.startswith(b"error: config out/config.yaml lies in output_dir out"), result.stderr
    assert (tmp_path / "out" / "config.yaml").read_text() == before


def test_the_recorded_command_can_be_pasted(tmp_path):
    options = ["--text", "two words; $HOME 'quoted'", "--output_dir", "a b"]
    assert run(tmp_path, "", *options).returncode == 0
    record = json.loads((tmp_path / "a b" / "run.json").read_text())
    assert shlex.split(record["command"])[1:] == options


# ------------------------------------------------------------------------------------------------------- launchers


def test_under_a_launcher_the_error_is_the_last_line(tmp_path):
    for body, line in (("raise UserError('row 3 is empty')", "error: row 3 is empty"), ("{}['x']", "KeyError: 'x'")):
        output = launch(
            "multi_cpu.yaml", stage_file(tmp_path, body), "--output_dir", tmp_path / line[:3], succeeds=False
        )
        lines = [line for line in output.splitlines() if line.strip(" =")]
        assert lines[-1].endswith(line), output
        said = sum(x == line for x in lines)  # the traceback of a bug may come from each rank
        assert said <= (1 if line.startswith("error") else 2) and "<N/A>" not in output


def test_ranks_end_with_their_launcher(tmp_path):
    body = "Path(f'pid_{os.environ[\"RANK\"]}').write_text(str(os.getpid()))\ntime.sleep(300)"
    file = stage_file(tmp_path, body)
    config = ROOT / "configs" / "accelerate" / "multi_cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    process = subprocess.Popen(
        [*command, "--main_process_port", "0", file],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(pids := [f.read_text() for f in tmp_path.glob("pid_*")]) < 2 or not all(pids):
        assert process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    pytest.fail("a rank outlived its launcher")


def test_a_stale_lock_of_the_compiler_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    wait_for_compiler()
    assert capsys.readouterr().out.startswith(f"DeepSpeed compiles into {tmp_path}, once; it can take ")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    wait_for_compiler()
    assert capsys.readouterr().out == ""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    with pytest.raises(UserError, match=f"^{lock} was left by a start of DeepSpeed that was killed; delete it"):
        wait_for_compiler(patience=1)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import time; f = open({str(lock)!r}); time.sleep(4)\nimport os; os.remove({str(lock)!r})",
        ]
    )
    time.sleep(1)
    wait_for_compiler(patience=1)
    assert holder.wait() == 0 and not lock.exists()


# ---------------------------------------------------------------------------------------------- models and trackers


@pytest.mark.parametrize(
    "path, message",
    [
        ("my model", "model folder my model does not exist"),
        ("models/tinyy", "model folder models/tinyy does not exist; models/tiny does"),
        ("models/other", "model folder models/other does not exist"),
        ("models/tiny/final", "model folder models/tiny/final does not exist"),
        ("./tiny", "model folder ./tiny does not exist"),
        ("a:b", "model folder a:b does not exist"),
        ("ünï/model", "model folder ünï/model does not exist"),
    ],
)
def test_a_missing_local_model_is_named_at_once(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    with pytest.raises(UserError) as caught:
        resolve_model_path(path)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "org-1/a_b.c"])
def test_a_hub_name_stays_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path(name) == name


def test_damaged_model_files_are_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    assert resolve_model_path(str(tmp_path / "m")) == str(tmp_path / "m")
    for damaged in (whole[:-100], whole[:50], b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=f"^{file} is damaged or not whole"):
            resolve_model_path(str(tmp_path / "m"))
    (tmp_path / "adapter").mkdir()
    for text in ("", "{", "[]", '{"r": 4}', "null"):
        (tmp_path / "adapter" / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match="adapter_config.json cannot be read"):
            adapter_base(str(tmp_path / "adapter"))
    for content in (b"", b"GGUF", b"GGUF\x03" + b"\0" * 40, b"not a model at all" * 9):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"^\S*a.gguf cannot be read, it may be damaged \(.*\); get it again$"):
            resolve_model_path(str(tmp_path / "a.gguf"))


def test_a_tracker_gets_the_runs_name_and_folder(tmp_path):
    calls = []

    class Accelerator:
        def init_trackers(self, project, config=None, init_kwargs=None):
            calls.append((project, init_kwargs))

    for tracker in ("wandb", "trackio", "tensorboard", "none"):
        start_trackers(Accelerator(), base_config("m", "d", tmp_path / "run 7", report_to=tracker))
    folder = str(tmp_path / "run 7")
    assert calls[0] == ("flatrlhf", {"wandb": {"name": "run 7", "dir": folder}})
    assert calls[1:] == [("flatrlhf", {"trackio": {"name": "run 7"}}), ("tensorboard", None)]


def test_another_folders_utils_does_not_hide_ours(tmp_path):
    (tmp_path / "utils.py").write_text("x = 1")
    for stages in (("train_ppo", "evaluate", "train_reward", "prepare_data"), ("prepare_data",)):
        code = f"import sys; sys.path.append({str(ROOT)!r}); import {', '.join(stages)}"
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_a_file_of_names_that_are_not_utf8(tmp_path):
    write_json(tmp_path / "a.json", {"name": os.fsdecode(b"\xff"), "x": "ü"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"name": "\udcff", "x": "ü"}


def test_an_unreadable_folder_is_one_line(tmp_path):
    result = run(tmp_path, "raise OSError(30, 'Read-only file system', 'out/metrics.jsonl')")
    assert result.stderr.decode() == "error: out/metrics.jsonl: Read-only file system; run the same command again\n"
