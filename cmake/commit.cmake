# Writes the header that names the commit of the sources.
# It runs in every build, as cmake -DSOURCE=DIR -DHEADER=FILE -P commit.cmake, and writes only a changed
# header. It appends "-dirty" if files that are built in differ from the commit. Without git the commit is
# empty, unless -DCOMMIT=HASH names it.
if(NOT COMMIT)
  set(git git -c safe.directory=* -C ${SOURCE})
  execute_process(COMMAND ${git} rev-parse --show-toplevel HEAD
      OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  string(REPLACE "\n" ";" found "${found}")
  list(LENGTH found length)
  if(failed EQUAL 0 AND length EQUAL 2)
    list(GET found 0 top)
    file(REAL_PATH "${SOURCE}" source)
    if(top STREQUAL source) # else the sources lie in the repository of another project
      list(GET found 1 COMMIT)
    endif()
  endif()
  if(COMMIT)
    execute_process(COMMAND ${git} status --porcelain -- csrc src cmake CMakeLists.txt pyproject.toml
        OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND COMMIT "-dirty")
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT "${HEADER}" CONTENT "#define ALLNORM_COMMIT \"${COMMIT}\"\n")
