#!/bin/sh
# Installs what tests use beyond Python: axe-core from npm into .venv/axe, and Debian packages, when root and on Debian.
# Says what is missing where it cannot.
axe=.venv/axe/node_modules/axe-core/axe.min.js
if [ ! -f "$axe" ]; then
    { command -v npm && npm install --silent --no-fund --no-audit --prefix .venv/axe axe-core@4; } >/dev/null 2>&1
    [ -f "$axe" ] || echo "not installed: axe-core (tests of accessibility are skipped); cure: install npm, then make system"
fi
packages="dataset-fashion-mnist chromium dicom3tools"
command -v dpkg-query >/dev/null 2>&1 || { echo "not a Debian system: tests that need $packages are skipped"; exit 0; }
missing=""
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq $missing >/dev/null && exit 0
fi
echo "not installed:$missing (tests that need them are skipped); cure: sudo apt-get install$missing"
exit 0
