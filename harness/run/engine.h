// Somebody else's sharded training in the place of the library's: PyTorch's engines, or a function of the user's. They train in
// a process of Python (golden/engine.h), and what their ranks hold is compared as the library's is, within the tolerance of the
// mode fast, because engines do not promise bits.
#pragma once

#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/run_case.h"

namespace harness {

class Engine {
 public:
  // Throws golden::EnvironmentError when it cannot run here.
  explicit Engine(std::string name);

  const std::string& name() const { return name_; }
  // Those of Shardproof's own: "torch-ddp", ...
  static const std::vector<std::string>& names();

  struct Fitted {
    Case c;
    std::string reason;  // why the engine cannot train the case; empty if it can
    std::string known;   // what goes wrong in PyTorch itself when it does; `verify` leaves such a case out, `replay` runs it
  };
  // The case as the engine can train it: in the mode fast, under the engine's own strategy, and without the library's options.
  // A fitted case stays as it is.
  Fitted fit(const Case& c) const;

  // Of a fitted case. Ranks are threads first. A case that does not hold is run once more on processes, whose verdict counts,
  // because PyTorch's threaded process group has faults of its own.
  Verdict run(const Case& c) const;

  // On processes.
  Ranks& ranks() const { return *processes_; }

 private:
  std::string name_;
  bool takes_ep_ = false;  // it is told how many ranks share the experts of a layer
  std::unique_ptr<Ranks> threads_, processes_;
};

}  // namespace harness
