// SPDX-License-Identifier: Apache-2.0

// Package launchnote writes the notes that several connectors' Renderers have in common.
package launchnote

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
)

// Resources tells of each limit that is set and that an engine has no setting for. why ends the sentence.
func Resources(r connector.Resources, why string) []connector.Note {
	var notes []connector.Note
	for _, limit := range []struct {
		name  string
		value config.Quantity
	}{{"maxMemory", r.MaxMemory}, {"maxDisk", r.MaxDisk}, {"maxBandwidth", r.MaxBandwidth}} {
		if limit.value != "" {
			notes = append(notes, NoEffect("resources."+limit.name, why))
		}
	}
	return notes
}

// NoEffect is a note of a setting that changes nothing.
func NoEffect(path, why string) connector.Note {
	return connector.Note{NoEffect: true, Path: path, Text: why}
}

// Mapped tells where a setting of pdkit's went.
func Mapped(path, where string) connector.Note { return connector.Note{Path: path, Text: where} }
