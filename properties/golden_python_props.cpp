// The two references against each other: what they share by mistake is all that could stay hidden.
#include "golden_runs.h"

namespace {

using namespace golden_runs;

void agree(const golden::Run& run) {
  const Widest widest(golden::train(run, at::kDouble), golden::train_in_python(run));
  if (getenv("EXPLORE")) { printf("APART %.3g %s\n", widest.apart, widest.where.c_str()); return; }
}

RC_GTEST_PROP(GoldenPython, an_mlp_trains_as_in_pytorch, ()) { agree(random_run(random_mlp())); }
RC_GTEST_PROP(GoldenPython, a_gpt_trains_as_in_pytorch, ()) { agree(random_run(random_gpt())); }

}  // namespace
