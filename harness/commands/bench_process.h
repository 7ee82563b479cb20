// Contestants of a benchmark, each in a process of its own.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/contestant.h"

namespace harness {

// Runs the shell command and returns the JSON object that it prints on a line. Throws Error when it fails, naming it.
nlohmann::json run_process(const std::string& command, const std::string& contestant);

double median(std::vector<double> values);

// What PyTorch's contestants are told of the model.
nlohmann::json model_spec(const bench::Size& size);

}  // namespace harness
