// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestTheVersionIsThatOfTheBuild(t *testing.T) {
	const module = "github.com/pdkit/pdkit"
	const commit = "v0.1.1-0.20261128001122-abcdefabcdef"
	hosted := func(version string, replace *debug.Module) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Path: "example.com/host", Version: "v7.0.0"},
			Deps: []*debug.Module{{Path: module, Version: version, Replace: replace}}}
	}
	own := func(path, version string) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Path: path, Version: version}}
	}
	for name, c := range map[string]struct {
		info *debug.BuildInfo
		want string
	}{
		"no information":   {nil, version + "-devel"},
		"a released one":   {hosted("v0.1.0", nil), "0.1.0"},
		"between releases": {hosted(commit, nil), commit[1:]},
		"from a folder":    {hosted("v0.1.0", &debug.Module{Path: "../pdkit"}), version + "-devel"},
		"a fork": {hosted("v0.1.0", &debug.Module{Path: "example.com/fork", Version: "v0.1.3"}),
			"0.1.3"},
		"a program of the repository": {&debug.BuildInfo{Main: debug.Module{Path: module + "/cmd", Version: commit},
			Deps: []*debug.Module{{Path: module, Version: "v0.1.0", Replace: &debug.Module{Path: "../"}}}}, commit[1:]},
		"go run and tests": {own(module, "(devel)"), version + "-devel"},
		"another's name":   {own(module+"-fork", "v3.0.0"), version + "-devel"},
	} {
		assert.Equal(t, c.want, builtVersion(c.info), name)
	}
}
