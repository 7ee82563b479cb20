// What a failing step's values may have come from, in words: mistakes are computed and compared with what ranks hold.
#pragma once

#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/compare/step_exchange.h"
#include "harness/run/update_suspects.h"
#include "harness/run/wrong_pieces.h"

namespace harness {

// The first step that differs, on both sides.
struct Failing {
  const Case& whole;
  const Case& c;  // as it is in this step
  const golden::Run& run;
  const golden::Trace& trace;
  const std::vector<RankStep>& ranks;
  size_t step;
  bool closely = false;        // roundings of fast mode count as well, since nothing else differs
  bool lists_replicas = true;  // whether a replica with the bits of another rank's is among what ranks hold (engine.h)

  const golden::StepTrace& golden() const { return trace[step]; }
  const golden::StepTrace* earlier() const {
    const int64_t last = run.steps[step].after.value_or(static_cast<int64_t>(step) - 1);
    return last < 0 ? nullptr : &trace[static_cast<size_t>(last)];
  }
  const golden::Named& begin() const { return earlier() ? earlier()->parameters : run.parameters; }
};

// Each gives "" where nothing that is known fits.
std::string guess_of_gradients(const Failing& failing, const WrongPieces& wrong);
// Of parameters and the optimizer's state. `before` are those before the step, in the golden order; null where there are none.
// `tensors` takes such tensors out of another trace.
std::string guess_of_results(const Failing& failing, const WrongPieces& wrong, const golden::Named* before,
                             const TensorsOf& tensors);
// Where the norm is wrong, at least on that rank, and the gradients are right.
std::string guess_of_norm(const Failing& failing, size_t rank);
// Where the loss scale of that rank is wrong, or it skipped a step that the golden run did not, or the other way round.
std::string guess_of_scale(const Failing& failing, size_t rank);
std::string guess_of_loss(const Failing& failing, size_t rank, size_t round);

// "a relative 1.0e-07 apart: another rounding, precision or order of sums"
std::string rounding_of(double apart);

}  // namespace harness
