// SPDX-License-Identifier: Apache-2.0

package yamlfile_test

import (
	"fmt"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
)

func ExampleRead() {
	docs, faults := yamlfile.Read(
		"shelf.yaml", []byte("store: north\n---\nkeep: 1m\nstoer: south # misspelt\nkeep: 2m\n"),
	)
	for _, d := range docs {
		var settings struct {
			Store string          `json:"store"`
			Keep  config.Duration `json:"keep"`
		}
		faults = append(faults, d.Faults(config.Decode(d.JSON, &settings))...)
	}
	fmt.Println(faults.Sorted())
	// Output:
	// shelf.yaml:4: stoer: unknown field; did you mean store?
	// shelf.yaml:5: keep: is given twice, first on line 3; keep one of the two
}
