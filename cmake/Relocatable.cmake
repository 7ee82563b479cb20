# What is built names no folder of this machine, so that it runs elsewhere out of one folder. Three links in that folder say
# where the rest is: `env`, an environment of Python; `packages`, the packages that have torch; `source`, this tree. ci/gpu
# makes them.
set(SHARDPROOF_AT_VENV env)
set(SHARDPROOF_AT_SOURCE source)
set(SHARDPROOF_AT_BUILD .)

# ccache makes paths relative as it is (Options.cmake), and so what it kept of other builds serves this one.
find_program(SHARDPROOF_CCACHE ccache)
if(NOT SHARDPROOF_CCACHE)
  # The last one that fits is taken.
  foreach(_folder "${CMAKE_SOURCE_DIR}=." "${SHARDPROOF_VENV}=env" "${CMAKE_BINARY_DIR}=build")
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${_folder}>")
  endforeach()
endif()

# Programs lie in the folder itself, and modules of Python two folders below it.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
foreach(_top "$ORIGIN" "$ORIGIN/../..")
  list(APPEND CMAKE_INSTALL_RPATH "${_top}")
  foreach(_libraries torch/lib nvidia/cu13/lib nvidia/nccl/lib)
    list(APPEND CMAKE_INSTALL_RPATH "${_top}/packages/${_libraries}")
  endforeach()
endforeach()
