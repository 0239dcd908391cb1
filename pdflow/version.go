// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"runtime/debug"
	"strings"
)

// built is the version that engines see as User-Agent where a client names none, and that telemetry has as the version
// of its scope.
var built = func() string {
	info, _ := debug.ReadBuildInfo()
	return builtVersion(info)
}()

// builtVersion returns the version of this module in a program: that of a release (0.1.0), or of a commit between
// releases as the go command writes it. Code from a folder, of which the go command knows no version, is that of the
// next release with -devel.
func builtVersion(info *debug.BuildInfo) string {
	const module = "github.com/pdkit/pdkit"
	v := ""
	if info != nil {
		if strings.HasPrefix(info.Main.Path+"/", module+"/") { // this module, or a program of this repository
			v = info.Main.Version
		}
		for _, m := range info.Deps {
			if m.Path != module {
				continue
			}
			if m.Replace == nil {
				v = m.Version
			} else if m.Replace.Version != "" { // a fork's
				v = m.Replace.Version
			}
		}
	}
	if v == "" || v == "(devel)" {
		return version + "-devel"
	}
	return strings.TrimPrefix(v, "v")
}
