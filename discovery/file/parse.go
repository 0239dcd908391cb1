// SPDX-License-Identifier: Apache-2.0

package file

import (
	"errors"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// maxFaults bounds the memory for the faults of one file.
const maxFaults = 100

// Faults lists the faults of a file in the order of its lines, at most 100. It holds no value of the file, since
// addresses and attributes may be secrets.
type Faults yamlfile.Faults

// Error returns the first three faults in one line, and how many more there are.
func (fs Faults) Error() string { return yamlfile.Faults(fs).Short() }

// Parse reads a list of endpoints in YAML or JSON: one mapping with the one key endpoints. It returns the whole list,
// or an error of type [Faults]. An empty list is written as [].
func Parse(data []byte) ([]discovery.Endpoint, error) {
	docs, faults := yamlfile.Read("", data)
	var list []discovery.Endpoint
	switch {
	case len(docs) == 0 && len(faults) == 0:
		empty := &config.FieldError{Path: "file", Problem: "is empty", Remedy: "write endpoints: [] for none"}
		return nil, Faults{{Line: 1, FieldError: empty}}
	case len(docs) > 1:
		faults = append(faults,
			docs[1].Fault(&config.FieldError{Problem: "is a second document", Remedy: "write one list"}))
	case len(docs) == 1:
		var err error
		list, err = endpoints(docs[0])
		faults = append(faults, docs[0].Faults(err)...)
	}
	if faults = faults.Sorted(); len(faults) > 0 {
		return nil, Faults(faults[:min(len(faults), maxFaults)])
	}
	return list, nil
}

func endpoints(d *yamlfile.Document) ([]discovery.Endpoint, error) {
	var file struct {
		Endpoints []static.Entry `json:"endpoints"`
	}
	err := config.Decode(d.JSON, &file)
	if file.Endpoints == nil {
		missing := &config.FieldError{Path: "endpoints", Problem: "is missing", Remedy: "write endpoints: [] for none"}
		return nil, errors.Join(err, missing)
	}
	list, wrong := static.Endpoints(file.Endpoints)
	return list, errors.Join(err, config.Within("endpoints", wrong))
}
