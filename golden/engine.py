"""Hands a run to a process of Python that trains it with somebody else's engine: shardproof.check.server.

Embedded into the library at build time, and run by the Python that is embedded in the program. The process is started once and
kept. It builds models by golden/oracle.py, whose source goes with the first message.
"""

import os
import pickle
import subprocess
import sys
import tempfile


class Server:
    def __init__(self, package, oracle):
        path = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardproof.check.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment,
        )
        self.send(oracle)

    def send(self, message):
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def ask(self, message):
        try:
            self.send(message)
            return pickle.load(self.process.stdout)
        except (OSError, EOFError):
            self.process.wait()
            self.log.seek(0)
            said = self.log.read().decode(errors="replace").strip()
            raise RuntimeError(f"the process that trains with the engine has ended: {said[-2000:]}") from None


server = None


def _ask(package, oracle, message):
    global server
    if server is None or server.process.poll() is not None:
        server = Server(package, oracle)
    return server.ask(message)


def facts(package, oracle, engine):
    """Why the engine cannot run here, or "", and whether it takes `ep`."""
    return _ask(package, oracle, ("facts", engine))


def train(package, oracle, setup, kind, model_options, parameters, optimizer_options, steps):
    """What each rank held after each step, as [step][rank], in the form of golden/oracle.py."""
    run = {"kind": kind, "model": model_options, "parameters": parameters, "optimizer": optimizer_options, "steps": steps}
    error, result = _ask(package, oracle, ("train", setup, run))
    if error:
        raise RuntimeError(error)
    return result
