# Stands between a command and a session's log. Arguments: mark, "1" for input, the command.
# Each read of a stream becomes one line of base64. When the command's own process has ended and what it
# wrote has been read, both streams get the mark with the exit code; then it goes on for whoever still
# holds them. Input comes as numbered frames; a number that was seen is dropped, length 0 is the end.
# Comes after `streams.pl`. Perl's own functions only: loading a module costs more than all of this.
my ($m, $in, @c) = @ARGV;
delete $ENV{PERL_BADLANG};
pipe(O, P) && pipe(E, F) && pipe(I, J) && pipe(R, W) or exit 125;
my $pid = fork;
exit 125 unless defined $pid;
if (!$pid) {
	setpgrp(0, 0);
	open(STDIN, $in ? "<&I" : "</dev/null");
	open(STDOUT, ">&P");
	open(STDERR, ">&F");
	exec { $c[0] } @c;
	exit 127;
}
$SIG{PIPE} = "IGNORE";
$SIG{CHLD} = sub { syswrite W, "x" };
syswrite W, "x";    # it may have ended before we listened
close P; close F; close I;
binmode $_ for *O, *E, *J, *STDIN, *STDOUT, *STDERR;
my ($code, $buf, $pend, $last, $end) = (undef, "", "", 0, !$in);
my %open = (1 => *O, 2 => *E);
close J if !$in;
my $feed = $in;

sub say_ { my ($s, $d) = @_; all($s == 1 ? *STDOUT : *STDERR, encoded($d) . "\n") }
sub take {    # false at the end of the stream
	my ($s) = @_;
	my $n = sysread $open{$s}, my $d, 65536;
	return 1 if !defined $n;
	if (!$n) { close $open{$s}; delete $open{$s}; return 0 }
	say_($s, $d);
	return 1;
}
sub ready { my ($s, $t) = @_; my $r = ""; vec($r, fileno $open{$s}, 1) = 1; return select($r, undef, undef, $t) > 0 }
sub broken { my ($said) = @_; $pend = ""; if ($feed) { close J; $feed = 0; say_(2, "$m!;") if $said } }
sub frames {
	while (1) {
		$buf =~ s/^\n+//;
		last unless $buf =~ /^(\d+) (\d+)\n/;
		my ($q, $l, $h) = ($1, $2, length $&);
		if ($l == 0) { $end = 1; $buf = ""; last }
		last if length($buf) < $h + $l;
		my $t = substr($buf, $h, $l);
		substr($buf, 0, $h + $l) = "";
		next if $q <= $last || !$feed;
		$last = $q;
		$t =~ tr|A-Za-z0-9+/||cd;
		$t =~ tr|A-Za-z0-9+/| -_|;
		$pend .= join "", map { unpack("u", chr(32 + int(length($_) * 3 / 4)) . $_) } $t =~ /(.{1,60})/gs;
	}
	if ($end && $feed && !length $pend) { close J; $feed = 0 }
}

while (!defined $code || %open) {
	my ($r, $w) = ("", "");
	vec($r, fileno R, 1) = 1 if !defined $code;
	vec($r, fileno $_, 1) = 1 for values %open;
	vec($r, fileno STDIN, 1) = 1 if $in && !$end && length($pend) < 1 << 20;
	vec($w, fileno J, 1) = 1 if $feed && length $pend;
	next if select($r, $w, undef, undef) < 0;
	for my $s (1, 2) { take($s) if $open{$s} && vec($r, fileno $open{$s}, 1) }
	if ($feed && length $pend && vec($w, fileno J, 1)) {
		my $n = syswrite J, $pend, 4096;    # so much fits without waiting when it is ready at all
		if (defined $n) { substr($pend, 0, $n) = ""; frames() if !length $pend }
		elsif ($! != 4) { broken(1) }
	}
	if (vec($r, fileno STDIN, 1)) {
		my $n = sysread STDIN, $buf, 262144, length $buf;
		if (defined $n && !$n) { $end = 1 }
		frames();
	}
	if (!defined $code && vec($r, fileno R, 1)) {
		sysread R, my $x, 64;
		if (waitpid($pid, 1) == $pid) {
			$code = $? & 127 ? 128 + ($? & 127) : $? >> 8;
			# What a pipe holds is soon read; whoever goes on writing is not the command.
			for my $s (1, 2) { my $n = 16; 1 while $n-- && $open{$s} && ready($s, 0) && take($s) }
			broken(0);
			say_(2, "$m=$code;");
			say_(1, "$m=$code;");
			$end = 1;
		}
	}
}
exit $code;
