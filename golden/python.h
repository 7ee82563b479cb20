// Between libgolden and libgolden_python: the second links libpython and is opened on first use, so that a
// machine without Python gets a message from `train_in_python` and everything else runs.
#pragma once

#include <string>

#include "golden/engine.h"
#include "golden/golden.h"
#include "golden/hugging_face.h"

namespace golden {

// The symbol "golden_python_train". Starts Python from the environment `venv` and imports torch the first
// time, then trains. Throws EnvironmentError when either fails. From any thread, one call at a time.
using PythonTrain = void(const std::string& venv, const Run& run, Trace* trace);
// The symbol "golden_python_transformers", which besides imports transformers.
using PythonTransformers = void(const std::string& venv, const PeerRun& run, PeerResult* result);
// The symbols "golden_python_facts_of_engine" and "golden_python_engine". These import no torch into this process.
using PythonFactsOfEngine = void(const std::string& venv, const std::string& package, const std::string& engine,
                                 EngineFacts* facts);
using PythonEngine = void(const std::string& venv, const EngineRun& run, EngineTrace* trace);

}  // namespace golden
