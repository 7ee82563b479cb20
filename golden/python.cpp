#include "golden/python.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <stdexcept>

#include "golden/validate.h"

namespace golden {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void missing(const std::string& what) {
  throw EnvironmentError(what + ". Run ./ci/setup, or set SHARDPROOF_VENV to a Python " GOLDEN_PYTHON_VERSION
                                " environment with the torch that this program was built with.");
}

// The file that the code at `address` was loaded from.
fs::path loaded_from(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  return info.dli_fname;
}

std::string environment_path() {
  const char* chosen = std::getenv("SHARDPROOF_VENV");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return loaded_from(reinterpret_cast<const void*>(&environment_path)).parent_path() / GOLDEN_VENV;
}

// Two copies of libtorch_cpu in one process would mix: Python must bring the very file that is already
// loaded.
void require_environment(const fs::path& venv) {
  std::error_code error;
  if (!fs::exists(venv / "bin" / "python", error)) missing(fmt::format("golden: no Python at {}/bin/python", venv.string()));
  const fs::path torch = venv / "lib" / "python" GOLDEN_PYTHON_VERSION / "site-packages" / "torch";
  const fs::path library = torch / "lib" / "libtorch_cpu.so";
  if (!fs::exists(library, error)) missing(fmt::format("golden: no torch in {}", torch.string()));
  const fs::path loaded = loaded_from(reinterpret_cast<const void*>(&at::get_num_threads));
  if (!fs::equivalent(library, loaded, error))
    missing(fmt::format("golden: this program runs with {}, Python would load {}", loaded.string(), library.string()));
}

// RTLD_GLOBAL: Python's extension modules take libpython's symbols from the process.
void* find_in_library(const char* name) {
  const fs::path here = loaded_from(reinterpret_cast<const void*>(&find_in_library)).parent_path();
  const fs::path library = here / "libgolden_python.so";
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) missing(fmt::format("golden: cannot load Python: {}", dlerror()));
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) missing(fmt::format("golden: {} is not what it should be: {}", library.string(), dlerror()));
  return symbol;
}

// Calls into Python, one at a time, with the environment's path.
template <class Function, class... Args>
void call_python(const char* name, const Args&... args) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const std::string venv = environment_path();
  require_environment(venv);
  reinterpret_cast<Function*>(find_in_library(name))(venv, args...);
}

}  // namespace

bool oracle_supports(const Run& run) {
  const Optimizer::Kind kind = run.optimizer.kind;
  const Precision& p = run.precision;
  for (const Step& step : run.steps)
    if (step.after) return false;
  const Llama& m = run.model.llama;
  const bool over_step = m.balance_over == Llama::BalanceOver::step;
  if (m.kv_rank != 0 || m.rotary_size != 0 || m.expert_lean != 0 || over_step) return false;
  return kind != Optimizer::Kind::lion && kind != Optimizer::Kind::muon && run.model.dropout() == 0 &&
         run.model.adapters.dropout == 0 && p.compute == at::kFloat && p.gradient == at::kFloat && p.reduce == at::kFloat &&
         run.scaling.initial == 0 && run.ema == 0;
}

Trace train_in_python(const Run& run) {
  require_valid(run);
  if (!oracle_supports(run))
    throw std::invalid_argument(
        "golden: the oracle in Python trains with sgd, adam or adamw, in float64, without loss scaling and dropout, "
        "step after step; it cannot check lion, muon, dropout, other dtypes, loss scaling, averages, latent attention, a "
        "rotary_size, an expert_lean or a balance over a step. Ask oracle_supports "
        "first");
  Trace trace;
  call_python<PythonTrain>("golden_python_train", run, &trace);
  return trace;
}

PeerResult run_in_transformers(const PeerRun& run) {
  PeerResult result;
  call_python<PythonTransformers>("golden_python_transformers", run, &result);
  return result;
}

EngineFacts facts_of_engine(const std::string& package, const std::string& engine) {
  EngineFacts facts;
  call_python<PythonFactsOfEngine>("golden_python_facts_of_engine", package, engine, &facts);
  return facts;
}

EngineTrace train_in_engine(const EngineRun& run) {
  require_valid(*run.run);
  EngineTrace trace;
  call_python<PythonEngine>("golden_python_engine", run, &trace);
  return trace;
}

}  // namespace golden
