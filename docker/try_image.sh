#!/usr/bin/env bash
# Builds the image with buildah and runs it where no container engine runs: base by debootstrap, root file system
# read-only, user 10001, one streamed answer by curl. Needs root, buildah, debootstrap. Everything it fetches comes from
# where this machine's own apt and pip fetch: their configuration is mounted for the build and is not in the image.
set -euo pipefail
cd "$(dirname "$0")/.."

export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot
base=${BASE_IMAGE:-localhost/python:3.11-slim}
image=localhost/everstream
port=${PORT:-18080}
work=$(mktemp -d)
cleanup() {
  [ -z "${server:-}" ] || { kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; } || true
  [ -z "${root:-}" ] || umount -R "$root" 2>/dev/null || true
  [ -z "${container:-}" ] || buildah rm "$container" >/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
say() { printf '\n== %s\n' "$*"; }

# pip's settings here, from all files and variables, as one file; and every local folder that they name.
python3 -m pip config list 2>/dev/null | sed -n "s/^\(:env:\|global\)\.\([a-z-]*\)='\(.*\)'$/\2 = \3/p" \
  | sort -u -t= -k1,1 | sed '1i [global]' >"$work/pip.conf"
mounts=(-v "$work/pip.conf:/etc/pip.conf:ro")
for path in $(tr ' ' '\n' <"$work/pip.conf" | sed -n 's,^\(file://\)\?\(/[^ ]*\)$,\2,p' | sed 's,/simple$,,' | sort -u) /etc/ssl/certs; do
  [ -f "$path" ] && path=$(dirname "$path")
  [[ " ${mounts[*]} " == *" $path:$path:ro "* ]] || mounts+=(-v "$path:$path:ro")
done

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  say "base image $base: debootstrap, Python 3.11"
  # shellcheck disable=SC2016  # the dollar is apt's
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/\?$')
  debootstrap --variant=minbase bookworm "$work/base" "$mirror" >"$work/debootstrap.log" 2>&1 \
    || { tail -n 5 "$work/debootstrap.log"; exit 1; }
  cp /etc/resolv.conf "$work/base/etc/resolv.conf"
  chroot "$work/base" /bin/sh -c "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends python3.11 python3.11-venv ca-certificates" >"$work/apt.log" 2>&1 \
    || { tail -n 5 "$work/apt.log"; exit 1; }
  ln -sf python3.11 "$work/base/usr/bin/python3"
  ln -sf python3 "$work/base/usr/bin/python"
  rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
  scratch=$(buildah from scratch)
  buildah add -q "$scratch" "$work/base" / >/dev/null
  buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$scratch"
  buildah commit -q --rm "$scratch" "$base" >/dev/null
  rm -rf "$work/base"
fi

say "build"
buildah bud --quiet --isolation chroot --network host --format docker "${mounts[@]}" \
  --build-arg BASE_IMAGE="$base" --build-arg TORCH_INDEX="${TORCH_INDEX:-}" -t "$image" .

say "size without weights"
container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
du -sm --apparent-size "$root" | awk '{print $1 " MiB"}'
buildah inspect --type image --format '{{.OCIv1.Config.User}} runs {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}' "$image"

say "run: root file system read-only, user 10001, weights in a volume"
volume=${VOLUME:-$work/models}
mkdir -p "$volume" && chown 10001:10001 "$volume"
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount --bind "$volume" "$root/models"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
mount --rbind /sys "$root/sys"
mount --make-rslave "$root/sys"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
enter=(chroot --userspec=10001:10001 "$root" env -i)
while IFS= read -r setting; do enter+=("$setting"); done < <(buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$image" | grep '=')
! "${enter[@]}" touch /srv/everstream/written 2>"$work/refused" || { echo "the root file system can be written"; exit 1; }
sed 's/^/a write is refused: /' "$work/refused"
if [ ! -d "$volume/smollm2-135m-instruct" ]; then
  "${PYTHON:-.venv/bin/python}" -m app pull --model-cache "$volume" >/dev/null 2>&1
  chown -R 10001:10001 "$volume"
fi
(cd / && exec "${enter[@]}" EVERSTREAM_INSECURE=true EVERSTREAM_PORT="$port" \
  /bin/sh -c 'cd /srv/everstream && exec python -m app serve') >"$work/server.log" 2>&1 &
server=$!
for _ in $(seq 240); do
  curl -fsS -o /dev/null "http://127.0.0.1:$port/health/ready" 2>/dev/null && break
  kill -0 "$server" 2>/dev/null || { cat "$work/server.log"; exit 1; }
  sleep 0.5
done
cat "$work/server.log"
"${enter[@]}" EVERSTREAM_PORT="$port" python /srv/healthcheck.py && echo "healthcheck: 0"

say "a streamed answer"
curl -sSN "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Say hello."}], "model": "smollm2-135m-instruct", "max_tokens": 12, "temperature": 0, "stream": true}'
ps -o user=,rss=,args= -p "$(pgrep -d, -f 'python -m (app serve|model\.worker)' -P "$server" || echo "$server")" | cut -c1-120

say "SIGTERM"
kill "$server"
wait "$server" && echo "ended with 0"
server=
