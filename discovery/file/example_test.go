// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
)

// The list in the set follows the file.
func Example() {
	dir, err := os.MkdirTemp("", "engines")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "endpoints.yaml")
	engine := func(host string) { // written beside, renamed over
		text := fmt.Sprintf("endpoints:\n  - {url: \"http://%s:8000\", role: both}\n", host)
		_ = os.WriteFile(path+".new", []byte(text), 0o600)
		_ = os.Rename(path+".new", path)
	}
	engine("10.0.0.1")

	source, err := file.New(path, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	set := discovery.NewSet(source)
	set.OnError(func(err error) { fmt.Println(err) })
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()

	for snap := range set.Changes(ctx) {
		for _, e := range snap.Endpoints {
			fmt.Println(e.ID, e.Role)
			if e.Host() == "10.0.0.2" {
				cancel()
			} else {
				engine("10.0.0.2")
			}
		}
	}
	<-done
	// Output:
	// 10.0.0.1:8000 both
	// 10.0.0.2:8000 both
}

// A program follows a file of its own.
func ExampleContents() {
	dir, err := os.MkdirTemp("", "contents")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "contents")
	if err := os.WriteFile(path, []byte("first"), 0o600); err != nil {
		fmt.Println(err)
		return
	}
	last := ""
	for data, err := range file.Contents(context.Background(), path, nil) {
		if err != nil || string(data) == last {
			continue // it is there again soon, or has not changed
		}
		last = string(data)
		fmt.Println(last)
		if last == "second" {
			return
		}
		if err := os.WriteFile(path, []byte("second"), 0o600); err != nil {
			fmt.Println(err)
			return
		}
	}
	// Output:
	// first
	// second
}
