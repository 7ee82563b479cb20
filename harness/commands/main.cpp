// build/shardproof.
#include "harness/commands/commands.h"
#include "harness/commands/program.h"

int main(int argc, char** argv) { return harness::run_program(argc, argv, {harness::add_bench_command}); }
