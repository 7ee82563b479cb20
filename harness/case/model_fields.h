// What the model of a case is made of, in one table for each kind. A field in it is printed, parsed and shrunk.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case_scanner.h"

namespace harness {

struct ModelField {
  const char* key;
  // As in the text of a case, e.g. "layers=2" or "tied"; empty where the value is the usual one and left out.
  std::function<std::string(const golden::Model&)> text;
  // Takes the value of "key=value". Throws Error that shows the column.
  std::function<void(golden::Model&, const Scanner&, const Scanner::Argument&)> read;
  // Models with a simpler value, the largest jumps first. Some may be invalid.
  std::function<std::vector<golden::Model>(const golden::Model&)> simpler;
};

// In the order of the text.
const std::vector<ModelField>& model_fields(golden::Model::Kind kind);

// Numbers from `least` to below `value`: the least, one halfway, and the one before.
std::vector<int64_t> smaller(int64_t value, int64_t least);

}  // namespace harness
