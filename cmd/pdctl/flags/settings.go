// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"

	"github.com/pdkit/pdkit/config/yamlfile"
)

// readSettings reads a configuration file of LMCache or vLLM: one mapping, in YAML or JSON. The error is one line and
// contains no value of the file.
func readSettings(content []byte) (map[string]any, error) {
	docs, faults := yamlfile.Read("", content)
	switch {
	case len(faults) > 0:
		return nil, errors.New(faults.Sorted().Short())
	case len(docs) == 0:
		return map[string]any{}, nil
	case len(docs) > 1:
		return nil, errors.New("is not one mapping")
	}
	v, err := decodeJSON(docs[0].JSON)
	m, _ := v.(map[string]any)
	return m, err
}
