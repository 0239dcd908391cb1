// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheTableOfTheReadmeTellsWhatIsProven(t *testing.T) {
	require.NoError(t, compareProven(filepath.Join("..", "..", "..", provenFile)))
	told := map[string]string{}
	for _, v := range verifications {
		told[v.connector] = cmp.Or(v.engine, "vLLM "+engineVersion)
	}
	write := func() string {
		raw, err := json.Marshal(told)
		require.NoError(t, err)
		file := filepath.Join(t.TempDir(), "proven.json")
		require.NoError(t, os.WriteFile(file, raw, 0o600))
		return file
	}
	require.NoError(t, compareProven(write()))
	told["lmcache"] = "vLLM " + engineVersion
	require.ErrorIs(t, compareProven(write()), errNotProven, "never run")
	delete(told, "lmcache")
	told["nixl"] = "vLLM 0.31.0"
	require.ErrorIs(t, compareProven(write()), errNotProven, "another version")
	delete(told, "nixl")
	require.ErrorIs(t, compareProven(write()), errNotProven, "left out")
}

func TestTheVersionIsTheInstalledOne(t *testing.T) {
	script, err := os.ReadFile("../install.sh")
	require.NoError(t, err)
	require.Contains(t, string(script), "\nVLLM="+engineVersion+" ")
	packages, err := os.ReadFile("../sglang/packages.txt")
	require.NoError(t, err)
	require.Contains(t, string(packages), "\nsglang=="+sglangVersion+"\n")
	for _, v := range verifications {
		if v.config != "" {
			require.True(t, json.Valid([]byte(v.config)), v.name)
		}
		require.Equal(t, strings.ToLower(v.connector), v.connector)
	}
}
