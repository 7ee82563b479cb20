// The text that `train` reads when nobody gives it any: the same bytes on every machine. No Torch.
#pragma once

#include <string>

namespace harness {

// 1 MiB of lines such as "the old baker counts 7 small boats." and "42 and 17 are 59.": what comes next can be learnt in part.
std::string generated_text();

}  // namespace harness
