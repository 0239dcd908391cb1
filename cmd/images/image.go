// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user and group are no one's on any host: 65532 is what images without a shell have by custom, and the chart's.
const user = "65532:65532"

// image is a program's image: one for each architecture, below one index.
type image struct {
	program
	tag      string
	binaries []binary // at least one; all of one commit
}

func (im *image) name() string { return "pdkit-" + im.program.name }

// labels are https://github.com/opencontainers/image-spec/blob/v1.1.1/annotations.md.
func (im *image) labels() map[string]string {
	b := im.binaries[0]
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title":       im.name(),
		prefix + "description": im.description,
		prefix + "source":      "https://github.com/pdkit/pdkit",
		prefix + "licenses":    "Apache-2.0",
		prefix + "version":     b.version,
		prefix + "revision":    b.revision,
		prefix + "created":     b.committed.UTC().Format(time.RFC3339),
	}
}

// write writes the image into a tar file, and returns the digest of its index. The file is an OCI image layout, which
// podman, skopeo, ctr, kind and Docker's containerd store take. Docker's older store reads manifest.json beside it.
// folder is a new one, for the layout.
func (im *image) write(file, folder string) (v1.Hash, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var legacy []legacyImage
	for _, b := range im.binaries {
		one, err := im.of(b)
		if err != nil {
			return v1.Hash{}, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: one, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: b.arch},
		}})
		entry, err := im.legacy(one, b)
		if err != nil {
			return v1.Hash{}, err
		}
		legacy = append(legacy, entry)
	}
	index, ok := mutate.Annotations(index, im.labels()).(v1.ImageIndex)
	if !ok {
		return v1.Hash{}, errors.New("an index with annotations is no index")
	}
	if _, err := layout.Write(folder, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: index, Descriptor: v1.Descriptor{Annotations: map[string]string{
			"org.opencontainers.image.ref.name": im.tag,
			"io.containerd.image.name":          "docker.io/library/" + im.name() + ":" + im.tag, // ctr, podman
		}},
	})); err != nil {
		return v1.Hash{}, err
	}
	text, err := json.Marshal(legacy)
	if err != nil {
		return v1.Hash{}, err
	}
	if err := os.WriteFile(filepath.Join(folder, "manifest.json"), text, 0o600); err != nil {
		return v1.Hash{}, err
	}
	digest, err := index.Digest()
	if err != nil {
		return v1.Hash{}, err
	}
	return digest, pack(file, folder, im.binaries[0].committed)
}

// of returns the image of one architecture: the program as root's file, and how to run it.
func (im *image) of(b binary) (v1.Image, error) {
	content, err := im.layer(b)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.BestCompression))
	if err != nil {
		return nil, err
	}
	committed := v1.Time{Time: b.committed.UTC()}
	ports := map[string]struct{}{}
	for _, port := range im.ports {
		ports[port] = struct{}{}
	}
	one := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	one = mutate.ConfigMediaType(one, types.OCIConfigJSON)
	if one, err = mutate.ConfigFile(one, &v1.ConfigFile{
		OS: "linux", Architecture: b.arch, Created: committed, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{
			// The program itself is process 1: it gets the signal, and drains.
			Entrypoint: []string{"/" + im.program.name}, StopSignal: "SIGTERM",
			User: user, WorkingDir: "/", ExposedPorts: ports, Labels: im.labels(),
		},
	}); err != nil {
		return nil, err
	}
	return mutate.Append(one, mutate.Addendum{Layer: layer, History: v1.History{
		Created: committed, CreatedBy: "go run ./cmd/images",
	}})
}

// layer returns the uncompressed layer.
func (im *image) layer(b binary) ([]byte, error) {
	content, err := os.ReadFile(b.file)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := add(w, tar.Header{Name: im.program.name, Mode: 0o555, ModTime: b.committed}, content); err != nil {
		return nil, err
	}
	if im.link != "" {
		for _, h := range []tar.Header{
			{Typeflag: tar.TypeDir, Name: path.Dir(im.link) + "/", Mode: 0o755, ModTime: b.committed},
			{Typeflag: tar.TypeSymlink, Name: im.link, Linkname: "../" + im.program.name, Mode: 0o777,
				ModTime: b.committed},
		} {
			if err := add(w, h, nil); err != nil {
				return nil, err
			}
		}
	}
	for _, l := range b.licences {
		h := tar.Header{Name: "licenses/" + l.name, Mode: 0o444, ModTime: b.committed}
		if err := add(w, h, l.content); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}

// legacyImage is an entry of manifest.json, by which `docker load` finds images where Docker keeps them by itself. Such
// an image has one architecture.
type legacyImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (im *image) legacy(one v1.Image, b binary) (legacyImage, error) {
	m, err := one.Manifest()
	if err != nil {
		return legacyImage{}, err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	tag := im.name() + ":" + im.tag
	if len(im.binaries) > 1 {
		tag += "-" + b.arch
	}
	return legacyImage{Config: blob(m.Config.Digest), RepoTags: []string{tag}, Layers: []string{
		blob(m.Layers[0].Digest)}}, nil
}

// pack writes the files of a folder into a tar file, in the order of their names, all with the same time.
func pack(file, folder string, modified time.Time) (err error) {
	f, err := os.Create(file) //nolint:gosec // whoever runs the command names the folder
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	tree := os.DirFS(folder)
	if err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		return add(w, tar.Header{Name: name, Mode: 0o644, ModTime: modified}, content)
	}); err != nil {
		return err
	}
	return w.Close()
}

// add writes one entry, by default a file, with nothing in its header that depends on the machine.
func add(w *tar.Writer, h tar.Header, content []byte) error {
	h.Size, h.Format = int64(len(content)), tar.FormatPAX
	if err := w.WriteHeader(&h); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}
