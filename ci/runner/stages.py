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


COMMAND = "{build}/shardproof"
KERNEL_TESTS = "device_math_props"
TESTS = (KERNEL_TESTS, "comm_nccl_props", "nccl_props", "nccl_training_props", "nccl_launch_props",
         "step_graph_props")


CTEST = ("ctest --test-dir {build} -L 'cuda|nccl' -LE nightly --timeout 300 --output-on-failure --no-tests=error "
         "--output-junit {junit}")
DRAWN = "--no-python --seed {seed} --failures {failures}"


def sanitizer(tool):
    return Stage(f"sanitizer-{tool}", f"compute-sanitizer: {tool} over the kernels",
                 f"SHARDPROOF_TEST_DEVICE=cuda RC_PARAMS=max_success=3 {{compute-sanitizer}} --tool {tool} --error-exitcode 9 "
                 f"{{build}}/{KERNEL_TESTS}", needs=("build-kernels",), tool="compute-sanitizer", least=30, most=240)


def checkpoints(device):
    train = f"{COMMAND} train --device {device} --checkpoint-dir {{scratch}}/checkpoints --check"
    return (f"rm -rf {{scratch}}/checkpoints && {train} --mesh dp_shard=2 --steps 4 --save-every 2 --async-save && "
            f"{train} --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 8 --resume")


def offload(device):
    return f"{COMMAND} train --device {device} --mesh dp_shard=2 --strategy zero3 --offload --steps 8 --check"


STAGES = (
    Stage("configure", "CMake", needs=(), least=5),
    Stage("build-kernels", "build the library and the tests of its kernels", targets=(KERNEL_TESTS,), needs=("configure",),
          most=1800),
    Stage("kernels", "the kernels' bits beside their twins'",
          f"SHARDPROOF_TEST_DEVICE=cuda RC_PARAMS=max_success=300 {{build}}/{KERNEL_TESTS}",
          f"RC_PARAMS=max_success=20 {{build}}/{KERNEL_TESTS}", needs=("build-kernels",), most=180),
    Stage("build-tests", "build the command and the tests of CUDA and NCCL", targets=("shardproof_command", *TESTS),
          needs=("build-kernels",), least=30, most=1800),
    Stage("ctest", "ctest -L 'cuda|nccl'", CTEST, CTEST, needs=("build-tests",), least=60, most=900),
    Stage("nccl-2", "two NCCL ranks on the GPU",
          f"{COMMAND} verify --backend nccl --device cuda --ranks 2 --cases 20 {DRAWN}",
          needs=("build-tests",), least=30, most=180),
    Stage("nccl-4", "four NCCL ranks on the GPU",
          f"{COMMAND} verify --backend nccl --device cuda --ranks 4 --cases 10 {DRAWN}",
          needs=("build-tests",), least=30, most=180),
    Stage("verify", "random cases whose seed nobody has seen",
          f"{COMMAND} verify --device cuda --minutes {{minutes}} {DRAWN} --json {{json}}",
          f"{COMMAND} verify --cases 20 {DRAWN} --json {{json}}",
          needs=("build-tests",), least=60, json=True),
    Stage("train", "training beside the golden run",
          f"{COMMAND} train --device cuda --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 20 --check --json {{json}}",
          f"{COMMAND} train --mesh dp_replicate=2,dp_shard=2 --strategy hsdp --steps 2 --check --json {{json}}",
          needs=("build-tests",), least=20, most=180, json=True),
    sanitizer("memcheck"),
    sanitizer("racecheck"),
    sanitizer("synccheck"),
    Stage("bench-kernels", "each kernel's share of a copy's bandwidth, at least 0.8",
          f"{COMMAND} bench kernels --mib 2048 --at-least 0.8 --json {{json}}",
          f"{COMMAND} bench kernels --device cpu --mib 1 --repeats 1 --rounds 1 --json {{json}}",
          needs=("build-tests",), least=20, most=180, json=True),
    Stage("bench-step", "a step of 1 billion parameters beside DDP and FSDP2",
          f"{COMMAND} bench --device cuda --model gpt1b --precision bf16 --ranks 1 --against ddp,fsdp2,fsdp2_zero2 "
          "--json {json}",
          f"{COMMAND} bench --model tiny --steps 2 --warmup 1 --rounds 1 --against ddp,fsdp2,fsdp2_zero2 --json {{json}}",
          needs=("build-tests",), least=120, most=900, json=True),
    Stage("checkpoints", "saves on one mesh, and goes on on another", checkpoints("cuda"), checkpoints("cpu"),
          needs=("build-tests",), least=30, most=180),
    Stage("bench-checkpoint", "saves and loads beside PyTorch's",
          f"{COMMAND} bench checkpoint --model gpt33m --rounds 1 --json {{json}}",
          f"{COMMAND} bench checkpoint --model tiny --repeats 1 --rounds 1 --json {{json}}", needs=("build-tests",), least=30,
          most=240, json=True),
    Stage("offload", "an optimizer in the host's memory, beside the golden run", offload("cuda"), offload("cpu"),
          needs=("build-tests",), least=20, most=180),
)
