// The subcommands of `shardproof`. Each adds itself to the parser; its body sets the exit code, as program.h says.
#pragma once

namespace CLI {
class App;
}

namespace harness {

void add_bench_command(CLI::App& app, int& exit_code);
void add_bench_checkpoint_command(CLI::App& bench, int& exit_code);
void add_bench_collectives_command(CLI::App& bench, int& exit_code);
void add_bench_kernels_command(CLI::App& bench, int& exit_code);
void add_bench_scaling_command(CLI::App& bench, int& exit_code);
void add_checkpoint_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_verify_command(CLI::App& app, int& exit_code);
void add_replay_command(CLI::App& app, int& exit_code);
void add_sample_command(CLI::App& app, int& exit_code);
void add_train_command(CLI::App& app, int& exit_code);

}  // namespace harness
