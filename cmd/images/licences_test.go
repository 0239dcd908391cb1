// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// permissive licences ask for no more than their text, which each image has.
var permissive = regexp.MustCompile(`Apache License|Permission is hereby granted, free\s+of\s+charge|` +
	`Redistribution and use in source and binary forms|Permission to use, copy, modify, and`)

// NOTICE names each module of the programs under further terms, and no others.
func TestNOTICENamesWhatAsksForMore(t *testing.T) {
	notice, err := os.ReadFile("../../NOTICE")
	require.NoError(t, err)
	env, err := buildEnv(t.Context(), "..", "amd64")
	require.NoError(t, err)
	root, err := command(t.Context(), "..", nil, "git", "rev-parse", "--show-toplevel")
	require.NoError(t, err)
	further := map[string]bool{}
	for _, p := range programs {
		all, err := licences(t.Context(), root, p.name, env)
		require.NoError(t, err)
		require.Greater(t, len(all), 20)
		texts := map[string]string{} // of each module
		for _, l := range all {
			if folder := path.Dir(l.name); folder != "." && !strings.HasSuffix(folder, "/licenses") {
				texts[folder] += string(l.content)
			}
		}
		for module, text := range texts {
			if !permissive.MatchString(text) || strings.Contains(text, "Mozilla Public License") ||
				strings.Contains(text, "SIL Open Font License") {
				further[module] = true
				assert.Contains(t, string(notice), module, "its licence asks for a notice")
			}
		}
	}
	named := regexp.MustCompile(`(?m)^  (\S+)(?:, (\S+))?$`).FindAllStringSubmatch(string(notice), -1)
	var listed []string
	for _, m := range named {
		listed = append(listed, slices.DeleteFunc(m[1:], func(s string) bool { return s == "" })...)
	}
	assert.ElementsMatch(t, slices.Collect(maps.Keys(further)), listed)
}
