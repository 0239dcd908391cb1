// SPDX-License-Identifier: Apache-2.0

// Package file is a discovery source that reads endpoints from a file and watches the file.
//
// The file is YAML or JSON: one mapping with the one key endpoints, at most 8 MiB.
//
//	endpoints:
//	  - {url: "http://10.0.0.1:8000", role: prefill, group: a, zone: z1, attributes: {bootstrapPort: "8998"}}
//	  - {url: "http://10.0.0.2:8000", role: decode, group: a}
//
// Each endpoint has a url and a role (prefill, decode, both or encode), and may have a group, a zone and attributes,
// whose values are strings. The source takes the whole list or nothing: a file with a fault in it changes nothing. To
// remove an engine, take it off the list. Its running requests go on, since the list only says where new requests go.
//
// To change the file safely, write another file beside it and rename it to the file's name. The source notices this, an
// update of a Kubernetes ConfigMap mounted as a folder, and writing in place.
package file
