# Read by every bash of the image (BASH_ENV). CANN's own file appends to paths, so it is read once, by the outermost one;
# it uses variables that may not be set.
if [ -z "${CANN_ENV_READ:-}" ]; then
    export CANN_ENV_READ=1
    corral_options="$(set +o)"
    set +eu
    # shellcheck disable=SC1090
    . "${CANN_ENV}"
    eval "${corral_options}"
    unset corral_options
fi
