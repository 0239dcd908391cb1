// SPDX-License-Identifier: Apache-2.0

// Package file is a discovery source of endpoints that stand in a file, which is watched.
//
// The file is YAML or JSON: one mapping with the one key endpoints, at most 8 MiB.
//
//	endpoints:
//	  - {url: "http://10.0.0.1:8000", role: prefill, group: a, zone: z1, attributes: {bootstrapPort: "8998"}}
//	  - {url: "http://10.0.0.2:8000", role: decode, group: a}
//
// Each endpoint has a url and a role (prefill, decode, both or encode), and may have a group, a zone and attributes,
// which are strings. A list is taken whole or not at all: a file with a fault in it changes nothing. An engine that is
// to leave is taken off the list; running requests go on, since the list only says where new ones go.
//
// The safe way to change the file is to write another one beside it and rename it over. Editors that do so, a
// Kubernetes ConfigMap mounted as a folder, and writing in place are all noticed.
package file
