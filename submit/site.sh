# shellcheck shell=bash
# Every submit script sources this file, with SITE set. It sources the site's file and activates the environment. After that
# `launch COMMAND...` starts RANKS ranks on NODES nodes if cluster.sweep has set these, or else all ranks of the allocation.
case "${PBS_O_WORKDIR:+${FLAGS:-}}" in  # in a PBS script the shell splits FLAGS at blanks
    *[]*?[\'\"\\]*)
        echo "FLAGS=$FLAGS: no flag may contain a blank, a wildcard, a quote or a backslash" >&2
        return 2 ;;
esac
workshop=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$workshop/.venv}
case $SITE in  # a name, or the path of your own file
    */*) site_file=$SITE ;;
    *) site_file=$workshop/submit/sites/$SITE.sh ;;
esac
[ -f "$site_file" ] || { echo "SITE=$SITE: there is no ${site_file#"$workshop/"}" >&2; return 2; }
[ -f "$venv/bin/activate" ] || { echo "no environment in $venv that you may read: make setup SITE=$SITE, or say where with VENV= (course.sh does)" >&2; return 2; }
. "$site_file" || { echo "$site_file failed: see above" >&2; return 2; }
. "$venv/bin/activate"
