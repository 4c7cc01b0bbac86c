# shellcheck shell=bash
# Sourced by every submit script, with SITE set: the site's settings and the workshop's environment. `launch COMMAND...`
# then starts RANKS ranks where that is set (submit/sweep.py does), else as many as the allocation is for.
workshop=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$workshop/.venv}
for needed in "$workshop/submit/sites/$SITE.sh" "$venv/bin/activate"; do
    if [ ! -f "$needed" ]; then
        echo "no $needed: take a SITE of submit/sites, and run make setup SITE=$SITE first (VENV= where that is)" >&2
        exit 2
    fi
done
. "$workshop/submit/sites/$SITE.sh"
. "$venv/bin/activate"
