"""The stages of ci/gpu, in the order of worth. In commands {name} stands for what `values` of ci/gpu says."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    title: str
    command: str = ""  # a line for the shell, on the GPU
    rehearsal: str = ""  # the same on the CPU, small; empty where nothing is left of it without a GPU
    targets: tuple = ()  # of the build, before the command
    needs: tuple = ()  # names of stages without which this one makes no sense
    tool: str = ""  # a program that the command needs, which a machine may lack
    least: int = 10  # seconds: with less time left the stage is not begun
    most: int = 600  # seconds
    json: bool = False  # it writes figures to {json}
    # It measures times, or is to be through before others begin. Neighbours that judge right and wrong run side by side.
    alone: bool = False


COMMAND = "{build}/shardproof"
KERNEL_TESTS = "device_math_props"
PROGRAMS = ("shardproof_command", KERNEL_TESTS, "comm_nccl_props", "nccl_props", "nccl_training_props", "nccl_launch_props",
            "step_graph_props")
PYTHON_MODULES = ("shardproof_python", "shardproof_python_cuda")

FIRST_KERNEL = f"{{build}}/{KERNEL_TESTS} --gtest_filter=Kernels.update_each_element_as_its_rule_says"
CTEST = ("{ctest} --test-dir {build} -L 'cuda|nccl' -LE nightly --parallel {jobs} --timeout 300 --output-on-failure "
         "--no-tests=error --output-junit {junit}")
DRAWN = "--no-python --seed {seed} --failures {failures}"
LLAMA = "{python} {root}/bench/llama_step.py"
READ_PROFILE = "{python} {root}/bench/read_profile.py"


def sanitizer(tool):
    return Stage(f"sanitizer-{tool}", f"compute-sanitizer: {tool} over the kernels",
                 f"SHARDPROOF_TEST_DEVICE=cuda RC_PARAMS=max_success=3 {{compute-sanitizer}} --tool {tool} --error-exitcode 9 "
                 f"{{build}}/{KERNEL_TESTS}", needs=("build-kernels",), tool="compute-sanitizer", least=30, most=240)


def nccl(ranks, cases):
    return Stage(f"nccl-{ranks}", f"NCCL on the GPU, ranks: {ranks}",
                 f"{COMMAND} verify --backend nccl --device cuda --ranks {ranks} --cases {cases} {DRAWN}",
                 needs=("build-tests",), least=30, most=180)


def checkpoints(device):
    train = f"{COMMAND} train --device {device} --checkpoint-dir {{scratch}}/checkpoints --check"
    return (f"rm -rf {{scratch}}/checkpoints && {train} --mesh dp_shard=2 --steps 4 --save-every 2 --async-save && "
            f"{train} --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 8 --resume")


def offload(device):
    return f"{COMMAND} train --device {device} --mesh dp_shard=2 --strategy zero3 --set offload=pinned --steps 8 --check"


STAGES = (
    Stage("configure", "CMake", needs=(), least=5, alone=True),
    Stage("build-kernels", "build the library and the tests of its kernels", targets=(KERNEL_TESTS,), needs=("configure",),
          most=1800, alone=True),
    Stage("first-kernel", "one kernel beside its twin",
          f"SHARDPROOF_TEST_DEVICE=cuda RC_PARAMS=max_success=5 {FIRST_KERNEL}", f"RC_PARAMS=max_success=5 {FIRST_KERNEL}",
          needs=("build-kernels",), most=60, alone=True),
    Stage("build-tests", "build the command and the tests of CUDA and NCCL", targets=PROGRAMS, needs=("build-kernels",),
          least=30, most=1800, alone=True),
    Stage("build-python", "build the Python package", targets=PYTHON_MODULES, needs=("build-tests",), least=30, most=900,
          alone=True),
    Stage("kernels", "the kernels' bits beside their twins'",
          f"SHARDPROOF_TEST_DEVICE=cuda RC_PARAMS=max_success=300 {{build}}/{KERNEL_TESTS}",
          f"RC_PARAMS=max_success=20 {{build}}/{KERNEL_TESTS}", needs=("build-kernels",), most=180),
    nccl(2, 20),
    Stage("ctest", "ctest -L 'cuda|nccl'", CTEST, CTEST, needs=("build-tests",), tool="ctest", least=60, most=900),
    nccl(4, 10),
    Stage("two-hosts", "two ranks of Python, as if on two hosts, beside FSDP2",
          f"{LLAMA} fsdp2,ours --device cuda --model tiny --precision fp32 --ranks 2 --steps 4",
          f"{LLAMA} fsdp2,ours --device cpu --model tiny --precision fp32 --ranks 2 --steps 2", needs=("build-python",),
          least=30, most=180),
    Stage("verify", "random cases whose seed nobody has seen",
          f"{COMMAND} verify --device cuda --minutes {{minutes}} {DRAWN} --json {{json}}",
          f"{COMMAND} verify --cases 20 {DRAWN} --json {{json}}",
          needs=("build-tests",), least=60, json=True),
    Stage("verify-python", "shardproof.verify of three models of transformers",
          "{python} {root}/ci/lib/verify_models.py --device cuda --minutes {minutes} --seed {seed}",
          "{python} {root}/ci/lib/verify_models.py --device cpu --cases 2 --seed {seed}", needs=("build-python",), least=60),
    Stage("train", "training beside the golden run",
          f"{COMMAND} train --device cuda --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 20 --check --json {{json}}",
          f"{COMMAND} train --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 2 --check --json {{json}}",
          needs=("build-tests",), least=20, most=180, json=True),
    nccl(1, 20),
    sanitizer("memcheck"),
    sanitizer("racecheck"),
    sanitizer("synccheck"),
    Stage("checkpoints", "saves on one mesh, and goes on on another", checkpoints("cuda"), checkpoints("cpu"),
          needs=("build-tests",), least=30, most=180),
    Stage("offload", "an optimizer in the host's memory, beside the golden run", offload("cuda"), offload("cpu"),
          needs=("build-tests",), least=20, most=180),
    Stage("step-python", "a step of a Llama of 0.9 billion parameters from Python beside FSDP2, Megatron-FSDP, plain",
          f"{LLAMA} plain,fsdp2,ours,megatron --device cuda --model llama0.9b --precision bf16 --steps 10 --json {{json}} "
          f"--profile {{profile}} && {READ_PROFILE} {{profile}}*.json",
          f"{LLAMA} plain,fsdp2,ours,megatron --device cpu --model tiny --precision fp32 --steps 2 --json {{json}} "
          f"--profile {{profile}} && {READ_PROFILE} {{profile}}*.json",
          needs=("build-python",), least=60, most=300, json=True, alone=True),
    Stage("step-cpp", "a step of 1 billion parameters beside FSDP2 and the unsharded step",
          f"{COMMAND} bench --device cuda --model gpt1b --precision bf16 --ranks 1 --steps 12 --warmup 3 --rounds 1 "
          f"--against fsdp2 --json {{json}} --profile {{profile}}.json && {READ_PROFILE} {{profile}}.json",
          f"{COMMAND} bench --model tiny --ranks 1 --steps 2 --warmup 1 --rounds 1 --against fsdp2 --json {{json}} "
          f"--profile {{profile}}.json && {READ_PROFILE} {{profile}}.json",
          needs=("build-tests",), least=60, most=300, json=True, alone=True),
    Stage("bench-kernels", "each kernel's share of a copy's bandwidth, at least 0.8",
          f"{COMMAND} bench kernels --mib 2048 --at-least 0.8 --json {{json}}",
          f"{COMMAND} bench kernels --device cpu --mib 1 --repeats 1 --rounds 1 --json {{json}}",
          needs=("build-tests",), least=20, most=180, json=True, alone=True),
    Stage("bench-checkpoint", "saves and loads beside PyTorch's",
          f"{COMMAND} bench checkpoint --model gpt33m --rounds 1 --json {{json}}",
          f"{COMMAND} bench checkpoint --model tiny --repeats 1 --rounds 1 --json {{json}}", needs=("build-tests",), least=30,
          most=240, json=True, alone=True),
)
