# shellcheck shell=bash
# Sourced by every submit script, with SITE set: the site's settings and the workshop's environment. `launch COMMAND...`
# then starts RANKS ranks, on NODES nodes, where that is set (submit/sweep.py does), else what the allocation is for.
case "${PBS_O_WORKDIR:+${FLAGS:-}}" in  # a PBS script leaves FLAGS to the shell, which splits it at blanks
    *[]*?[\'\"\\]*)
        echo "FLAGS=$FLAGS: no flag may hold a blank, a wildcard, a quote or a backslash" >&2
        exit 2 ;;
esac
workshop=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$workshop/.venv}
case $SITE in  # a name, or the path of a file of one's own
    */*) site_file=$SITE ;;
    *) site_file=$workshop/submit/sites/$SITE.sh ;;
esac
[ -f "$site_file" ] || { echo "SITE=$SITE: there is no ${site_file#"$workshop/"}" >&2; exit 2; }
[ -f "$venv/bin/activate" ] || { echo "no environment in $venv: make setup SITE=$SITE, or say where with VENV=" >&2; exit 2; }
. "$site_file" || { echo "$site_file failed: see above" >&2; exit 2; }
. "$venv/bin/activate"
