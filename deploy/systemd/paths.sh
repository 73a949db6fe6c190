# shellcheck shell=bash disable=SC2034
# SPDX-License-Identifier: Apache-2.0
# All that an installation has on a machine; install puts it there, uninstall takes it away.

readonly FOLDER=/opt/hotspare
readonly COMMAND=/usr/local/bin/hotspare
readonly UNITS=/etc/systemd/system
readonly SETTINGS=/etc/hotspare
readonly SYSUSERS=/etc/sysusers.d/hotspare.conf
readonly ACCOUNT=hotspare

need_root() { [ "$(id -u)" -eq 0 ] || die "this needs root"; }

booted() { [ -d /run/systemd/system ]; }

# In an image that is being built there is no manager to tell.
reload() { ! booted || systemctl daemon-reload; }
