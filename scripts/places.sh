# shellcheck shell=sh
# Where the environments of a clone are, and whether they are ready. Sourced with $root by scripts/run and
# scripts/environment; it changes nothing, and it starts as few programs as it can, because each start passes through it.
#
#   .venv            the packages as they stand in the clone (an editable install, always pure): tests, tools, pure build
#   .venv-compiled   a wheel that was built from the clone, for scripts/run

pure=${root:?}/.venv
compiled=$root/.venv-compiled

# With PYTHON=... an environment of another interpreter is not ready.
is_of_wanted_python() {
    [ -z "${PYTHON:-}" ] || [ "$(readlink -f -- "$1/bin/python")" = "$("$PYTHON" -c '
import os, sys
print(os.path.realpath(sys.executable))' 2>/dev/null)" ]
}

# The mark holds this place, because an environment cannot be moved, and all that an editable install copies.
pure_mark() {
    printf '%s ' "$root"
    cat -- "$root/setup.py"
}

# $1 is run or test
pure_is_ready() {
    [ -x "$pure/bin/python" ] && [ -r "$pure/made-for-$1" ] && is_of_wanted_python "$pure" &&
        [ "$(cat -- "$pure/made-for-$1")" = "$(pure_mark)" ]
}

# The mark holds this place and a checksum of each source, so that a changed one never runs as it was before.
compiled_mark() {
    printf '%s\n' "$root"
    (
        cd -- "$root" || exit
        find setup.py geventstalk journal -name '*.py' -exec cksum {} + | LC_ALL=C sort
    )
}

# $1 is the mark that is wanted
compiled_is_ready() {
    [ -x "$compiled/bin/geventstalk" ] && [ -r "$compiled/made" ] && is_of_wanted_python "$compiled" &&
        [ "$(cat -- "$compiled/made")" = "$1" ]
}

# What has to be there to compile: the compiler, and the file that $1 names, one of Python's headers.
toolchain() {
    command -v "${CC:-cc}" || command -v gcc || printf 'no compiler\n'
    [ ! -r "$1" ] || printf 'headers\n'
}

# Whether it is known that these sources ($1) cannot be compiled here; $reason says why.
compiling_fails() {
    [ -r "$compiled/made-pure" ] && is_of_wanted_python "$compiled" || return 1
    {
        IFS= read -r reason
        IFS= read -r headers
        known=$(cat)
    } <"$compiled/made-pure"
    : "$reason" # for the caller
    [ "$known" = "$(toolchain "$headers")
$1" ]
}
