# shellcheck shell=bash
# Sourced by every submit script, with SITE set: the site's settings, its function `launch`, the workshop's environment.
workshop=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$workshop/.venv}
for needed in "$workshop/submit/sites/$SITE.sh" "$venv/bin/activate" main.py; do
    if [ ! -f "$needed" ]; then
        echo "no $needed: submit in a chapter's folder, after make setup SITE=$SITE, with a SITE of submit/sites" >&2
        exit 2
    fi
done
. "$workshop/submit/sites/$SITE.sh"
. "$venv/bin/activate"
