# LibTorch out of PyTorch's wheel, as the imported target `shardproof::torch`.
#
# The wheel's own CMake package is not used: the wheel is a CUDA build, so that package demands a CUDA toolkit even
# where nobody wants one, and it edits global flags. Headers and libtorch_cpu are all that the CPU parts need.

# The versions that this library builds with. pyproject.toml's dependencies are read off here, too. What is installed goes with
# the version that it was built with.
if(NOT SHARDPROOF_TORCH_VERSIONS)
  set(SHARDPROOF_TORCH_VERSIONS 2.11 2.12 2.13 2.14 2.15)
endif()

file(GLOB _torch_candidates "${SHARDPROOF_VENV}/lib/python3.*/site-packages/torch")
list(LENGTH _torch_candidates _torch_count)
if(NOT _torch_count EQUAL 1)
  message(FATAL_ERROR "[LibTorch] expected one torch under ${SHARDPROOF_VENV}/lib/python3.*/site-packages, found "
                      "${_torch_count}. Run ci/setup, or set -DSHARDPROOF_VENV=DIR to an environment with torch")
endif()
set(SHARDPROOF_TORCH_DIR "${_torch_candidates}")

file(STRINGS "${SHARDPROOF_TORCH_DIR}/version.py" _torch_version_line REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+" SHARDPROOF_TORCH_VERSION "${_torch_version_line}")
if(NOT SHARDPROOF_TORCH_VERSION IN_LIST SHARDPROOF_TORCH_VERSIONS)
  list(JOIN SHARDPROOF_TORCH_VERSIONS ", " _torch_versions)
  message(FATAL_ERROR "[LibTorch] expected torch ${_torch_versions}, found ${SHARDPROOF_TORCH_VERSION} in "
                      "${SHARDPROOF_TORCH_DIR}. Run ci/setup, or install one of them there")
endif()

add_library(shardproof_torch INTERFACE)
add_library(shardproof::torch ALIAS shardproof_torch)
target_include_directories(shardproof_torch SYSTEM INTERFACE
  "${SHARDPROOF_TORCH_DIR}/include" "${SHARDPROOF_TORCH_DIR}/include/torch/csrc/api/include")
target_link_libraries(shardproof_torch INTERFACE
  "${SHARDPROOF_TORCH_DIR}/lib/libtorch_cpu.so" "${SHARDPROOF_TORCH_DIR}/lib/libc10.so")

# fmt: the headers that torch ships, so that a process holds one version. Inside this tree they are compiled once, into a small
# library: header-only, the whole of fmt would be compiled into every file, which took a third of the build.
# Programs outside that use an installed Shardproof take them header-only.
if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/fmt.cpp")
  add_library(shardproof_fmt STATIC "${CMAKE_CURRENT_LIST_DIR}/fmt.cpp")
  target_compile_features(shardproof_fmt PRIVATE cxx_std_20)
  set_target_properties(shardproof_fmt PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(shardproof_fmt SYSTEM PRIVATE "${SHARDPROOF_TORCH_DIR}/include")
  target_link_libraries(shardproof_torch INTERFACE "$<BUILD_INTERFACE:shardproof_fmt>")
else()
  target_compile_definitions(shardproof_torch INTERFACE FMT_HEADER_ONLY=1)
endif()
