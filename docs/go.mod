// This folder has no Go code. It is a module so that the zip of the library, which each user downloads, leaves the
// pages, pictures and recordings out.
module github.com/pdkit/pdkit/docs

go 1.26.0
