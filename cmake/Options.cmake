# Compile options of every target, and the one precompiled header that all Torch users share.
add_library(shardproof_options INTERFACE)
target_compile_features(shardproof_options INTERFACE cxx_std_20)
# -ffp-contract=off and -fno-fast-math: every elementwise kernel of ours must do the same IEEE operations wherever an
# element lies; -fno-math-errno lets sqrt vectorise and changes no value.
# -fPIC for programs too: a precompiled header serves only files that were compiled with its own settings.
target_compile_options(shardproof_options INTERFACE -fPIC -Wall -Wextra -Wno-unused-parameter -ffp-contract=off -fno-math-errno)
find_package(Threads REQUIRED)
# The readers of checkpoints parse JSON, and so do reports and tests.
find_package(nlohmann_json REQUIRED)
target_link_libraries(shardproof_options INTERFACE shardproof::torch Threads::Threads nlohmann_json::nlohmann_json)

find_program(SHARDPROOF_CCACHE ccache)
if(SHARDPROOF_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}"
    CCACHE_NOHASHDIR=1 "${SHARDPROOF_CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()

# Sources are compiled four at a time. Beside a precompiled header of LibTorch, GCC spends two seconds a file on templates that
# the header leaves to be instantiated, as much as on the code of a typical file here; in a group it spends them once. Larger
# groups save little more, and an edited file would wait longer for the rest of its group.
# -DCMAKE_UNITY_BUILD=OFF compiles each file alone, which also shows an include that a file forgot.
option(CMAKE_UNITY_BUILD "Compile sources in groups of SHARDPROOF_GROUP_SIZE" ON)
set(SHARDPROOF_ALONE "" CACHE STRING "Targets whose files are compiled alone; ci/faults changes one file after another")
set(SHARDPROOF_GROUP_SIZE 4)
set(CMAKE_UNITY_BUILD_BATCH_SIZE ${SHARDPROOF_GROUP_SIZE})
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC takes each file of a group for a header, where an anonymous namespace would be a mistake.
  add_compile_options(-Wno-subobject-linkage)
endif()

option(SHARDPROOF_COVERAGE "Count which lines and branches of impl/ run (ci/coverage)" OFF)
if(SHARDPROOF_COVERAGE AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "SHARDPROOF_COVERAGE needs Clang: GCC counts the branches of exceptions, which no source has. "
                      "Use the preset coverage, in a build folder of its own")
endif()

# LibTorch's headers cost seconds a file; they are parsed once, here.
# Written only when it differs: a younger file would rebuild everything.
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/pch/torch_pch.cpp" CONTENT "")
function(shardproof_precompile name)
  add_library(${name} OBJECT "${CMAKE_BINARY_DIR}/pch/torch_pch.cpp")
  target_link_libraries(${name} PRIVATE shardproof_options)
  target_precompile_headers(${name} PRIVATE
    <ATen/ATen.h> <torch/nn/module.h> <torch/csrc/autograd/function.h> <fmt/format.h> <fmt/ranges.h>
    <algorithm> <functional> <map> <memory> <string> <vector>)
endfunction()
shardproof_precompile(shardproof_pch)
set(SHARDPROOF_PCH shardproof_pch)

# Most files are tests. Optimised less, which their own code does not need, they take three quarters of the time to compile;
# with a sanitizer they take three times as long.
set(SHARDPROOF_TEST_OPTIONS "$<$<CONFIG:Release>:-O1>")
option(SHARDPROOF_PLAIN_TESTS "Compile tests without the sanitizers of what they test" OFF)
if(SHARDPROOF_PLAIN_TESTS)
  list(APPEND SHARDPROOF_TEST_OPTIONS -fno-sanitize=all)
endif()
shardproof_precompile(shardproof_tests_pch)
target_compile_options(shardproof_tests_pch PRIVATE ${SHARDPROOF_TEST_OPTIONS})

# Compiled with Torch's headers precompiled.
function(shardproof_uses_torch target)
  target_precompile_headers(${target} REUSE_FROM ${SHARDPROOF_PCH})
  target_link_libraries(${target} PRIVATE shardproof_options)
endfunction()
