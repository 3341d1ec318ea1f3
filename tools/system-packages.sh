#!/bin/sh
# Installs the Debian packages that tests use, when root and on Debian; otherwise says what is missing.
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
