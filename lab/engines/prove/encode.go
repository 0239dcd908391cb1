// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector/epd"
	nixlconn "github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/lab/internal/apis"
)

// stand is where the encode stage is proven. The encode engine E writes embeddings into a folder. P reads them through
// a symbolic link, which can be cut like a mount.
//
// P is blind: its vision tower is all zeros, so all images are the same for P. D sees as E does, but has no EC
// connector. So the text is right in two cases only. Either E encoded the image, P took E's embedding and D took P's
// KV, or D computed the prompt itself. D's count of tokens taken over excludes the second case.
type stand struct {
	lab          *lab
	folder, link string
	endpoints    []discovery.Endpoint
	d            string // the URL of the decode engine
}

// look is a chat with images.
type look struct {
	question question
	images   int // distinct ones
}

// seen is what came of a look.
type seen struct {
	look      look
	response  *response
	reference string // the text of the decode engine alone
	encoded   int    // embeddings that E wrote for it
	tokens    int    // prompt tokens that D took over from P
}

func (s seen) right() bool {
	return s.response.right(s.reference)
}

// carried reports whether E encoded each image once, and D took over the whole prompt.
func (s seen) carried() bool {
	return s.encoded == s.look.images && s.response.PromptTokens > 0 && s.tokens == s.response.PromptTokens
}

// proveEncode proves the encode stage with nixl behind it, and then cuts the link: the proof must find that.
func proveEncode(ctx context.Context, lab *lab) error {
	begin := time.Now()
	s, err := newStand(ctx, lab)
	if err != nil {
		return err
	}
	fmt.Printf("encode, prefill and decode engine ready after %.0f s\n\n", time.Since(begin).Seconds())

	fmt.Println("encoder.type example before nixl, the prefill engine blind: every response against one engine alone")
	all, err := s.show(ctx, 0)
	if err != nil {
		return err
	}
	if problems := encodeProblems(all); len(problems) > 0 {
		fmt.Printf("the encode stage is not proven:\n  - %s\n\n", strings.Join(problems, "\n  - "))
		return errNotProven
	}
	fmt.Print("proven: the encode engine encoded each image, and the prefill engine took it over\n\n")

	fmt.Println("the folder is not shared: the proof must find that the prefill engine saw no image")
	if err := s.cut(); err != nil {
		return err
	}
	if all, err = s.show(ctx, 1); err != nil {
		return err
	}
	if odd := uncutProblems(all); len(odd) > 0 {
		fmt.Printf("the proof finds nothing wrong with these, so it proves nothing:\n  - %s\n\n",
			strings.Join(odd, "\n  - "))
		return errNotProven
	}
	fmt.Print("found, as it must be: the prefill engine encoded the images itself\n\n")
	return nil
}

// encodeProblems says what is not proven.
func encodeProblems(all []seen) []string {
	var problems []string
	for _, s := range all {
		if !s.right() {
			problems = append(problems, fmt.Sprintf("%s: the text is not that of one engine alone", s.look.question))
		}
		if !s.carried() {
			problems = append(problems, fmt.Sprintf("%s: %d of %d images encoded, %d of %d prompt tokens taken over",
				s.look.question, s.encoded, s.look.images, s.tokens, s.response.PromptTokens))
		}
	}
	return problems
}

// uncutProblems says where the cut link did not show: a chat with images must get a wrong text, and one without images
// the right one.
func uncutProblems(all []seen) []string {
	var problems []string
	for _, s := range all {
		if s.response.status != http.StatusOK || !s.carried() || s.right() != (s.look.images == 0) {
			problems = append(problems, fmt.Sprintf("%s: %s, text equal: %t", s.look.question, s.response, s.right()))
		}
	}
	return problems
}

func newStand(ctx context.Context, lab *lab) (*stand, error) {
	dir, err := filepath.Abs(lab.dir)
	if err != nil {
		return nil, err
	}
	s := &stand{lab: lab, folder: filepath.Join(dir, "embeddings"), link: filepath.Join(dir, "mount")}
	seeing, blind := filepath.Join(dir, "seeing", "model"), filepath.Join(dir, "blind", "model")
	if err := errors.Join(os.Mkdir(s.folder, 0o750), os.Symlink(s.folder, s.link), makeModel(ctx, lab, seeing),
		makeModel(ctx, lab, blind, "--blind")); err != nil {
		return nil, err
	}
	setups := []struct {
		role          discovery.Role
		model, folder string
	}{
		{discovery.RoleEncode, seeing, s.folder}, {discovery.RolePrefill, blind, s.link},
		{discovery.RoleDecode, seeing, s.link},
	}
	wanted := make([]engineOptions, len(setups))
	for i, setup := range setups {
		o := &wanted[i]
		o.role = setup.role.String()
		if o.port, o.side, err = twoPorts(); err != nil {
			return nil, err
		}
		s.endpoints = append(s.endpoints, endpoint(setup.role, o.port, map[string]string{"sideChannelPort": o.side}))
	}
	for i, setup := range setups {
		more, err := s.settings(s.endpoints[i], setup.folder)
		if err != nil {
			return nil, err
		}
		wanted[i].more = append(more, "PDKIT_MODEL="+setup.model)
	}
	s.d = s.endpoints[2].URL.String()
	_, err = lab.startEngines(ctx, wanted...)
	return s, err
}

// makeModel writes the tiny model with a vision tower into a folder.
func makeModel(ctx context.Context, lab *lab, folder string, more ...string) error {
	installed := cmp.Or(os.Getenv("PDKIT_ENGINES_DIR"), ".engines")
	//nolint:gosec // G204: the folder of the engines is the caller's choice
	cmd := exec.CommandContext(ctx, filepath.Join(installed, "venv", "bin", "python"),
		filepath.Join(filepath.Dir(lab.script), "make-vision-model.py"), filepath.Join(installed, "model"), folder)
	cmd.Args = append(cmd.Args, more...)
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("making the model: %w\n%s", err, output)
	}
	return nil
}

// settings are the arguments of engine.sh for an engine, as the stage renders them.
func (s *stand) settings(e discovery.Endpoint, folder string) ([]string, error) {
	inner, err := nixlconn.New(nil)
	if err != nil {
		return nil, err
	}
	stage, err := epd.Wrap(inner, &epd.Options{Type: epd.Example, SharedStoragePath: folder})
	if err != nil {
		return nil, err
	}
	settings, err := render(stage, nil, e, s.endpoints, engineVersion)
	return arguments(settings), err
}

// cut makes P's folder an empty one.
func (s *stand) cut() error {
	empty := s.folder + "-not-shared"
	return errors.Join(os.Mkdir(empty, 0o750), os.Remove(s.link), os.Symlink(empty, s.link))
}

// show sends the chats through a gateway of their own, and prints what came of them.
func (s *stand) show(ctx context.Context, round int) ([]seen, error) {
	gateway, err := s.lab.startGateway(
		ctx, gatewayOptions{connector: nixlconn.Name, encoder: epd.Example, endpoints: s.endpoints},
	)
	if err != nil {
		return nil, err
	}
	all, err := s.observe(ctx, gateway.url, looks(round))
	if err = errors.Join(err, stopGateway(gateway)); err != nil {
		return nil, err
	}
	printSeen(os.Stdout, all)
	return all, nil
}

// observe sends the chats one after the other, so that each one's share of files and counters is known.
func (s *stand) observe(ctx context.Context, gateway string, looks []look) ([]seen, error) {
	var all []seen
	for _, l := range looks {
		files, err := s.embeddings()
		if err != nil {
			return nil, err
		}
		before, err := readMetrics(ctx, s.d)
		if err != nil {
			return nil, err
		}
		one := seen{look: l, response: ask(ctx, gateway, l.question, nil)}
		after, err := waitFor(ctx, s.d, 3*time.Second, func(m metrics) bool {
			return rise(before, m, takenOver) >= one.response.PromptTokens
		})
		if err != nil {
			return nil, err
		}
		one.tokens = rise(before, after, takenOver)
		if one.encoded, err = s.embeddings(); err != nil {
			return nil, err
		}
		one.encoded -= files
		if one.reference, err = alone(ctx, s.d, l.question); err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// embeddings counts the files that E has written.
func (s *stand) embeddings() (int, error) {
	files, err := filepath.Glob(filepath.Join(s.folder, "*", "*.safetensors"))
	return len(files), err
}

func printSeen(w io.Writer, all []seen) {
	table := newTable(w, "text equal\timages\tencoded\tprompt tokens\ttaken over")
	for _, s := range all {
		equal := "yes"
		if !s.right() {
			equal = "NO"
		}
		table.row(s.look.question, s.response, equal, s.look.images, s.encoded, s.response.PromptTokens, s.tokens)
	}
	_ = table.Flush()
}

// looks are the chats of a round: with images that no engine has seen in a round before.
func looks(round int) []look {
	picture := func(n int) string { return picture(5*round + n) } // a round has 5
	return []look{
		newLook("one image", false, 1, picture(1)),
		newLook("one image", true, 1, picture(2)),
		newLook("two images", false, 2, picture(3), picture(4)),
		newLook("an image twice", false, 1, picture(5), picture(5)),
		newLook("no image", false, 0),
	}
}

func newLook(name string, stream bool, distinct int, pictures ...string) look {
	q := newQuestion(apis.Chat, stream, 60, 32)
	var content []any
	for _, p := range pictures {
		content = append(content, map[string]any{"type": "image_url", "image_url": map[string]string{"url": p}})
	}
	content = append(content, map[string]string{"type": "text", "text": q.prompt})
	return look{images: distinct, question: q.with(name,
		map[string]any{"messages": []any{map[string]any{"role": "user", "content": content}}})}
}

// picture returns a data: URL. Each number gives another picture.
func picture(n int) string {
	const side = 48 // not the size that the model sees
	m := image.NewNRGBA(image.Rect(0, 0, side, side))
	for i := range m.Pix {
		m.Pix[i] = byte(i / (n + 1) * (2*n + 1)) // only the lowest byte counts
		if i%4 == 3 {
			m.Pix[i] = 255 // opaque
		}
	}
	var b bytes.Buffer
	_ = png.Encode(&b, m) // neither the picture nor the buffer can fail
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString(b.Bytes())
}
